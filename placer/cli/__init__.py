"""The command line: one file per command, nothing heavy imported outside a command's body."""
