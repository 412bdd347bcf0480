"""The host tier: its pages, backups from the device and loads to it."""
