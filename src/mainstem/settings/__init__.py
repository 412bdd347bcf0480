"""Every setting, declared once: its name, type, default, range and help. The command line and the parts take these."""
