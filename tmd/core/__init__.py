"""What to do: pure decisions on frozen values. No IO, no clock, no torch, no asyncio."""
