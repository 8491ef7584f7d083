"""Servers as processes of this machine: described by a file, started in order, kept, and taken down without a trace."""
