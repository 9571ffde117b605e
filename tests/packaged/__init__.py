"""Packages and images as a machine gets them: installed, started, removed. Each needs root."""
