"""The scenarios of the campaign, as data: each TOML file is a story that one cluster plays.

:mod:`tmd.campaign.reading` reads them. There is no code here.
"""
