"""What is resident: pool memory, SSD extents, and the catalogue that owns both.

All of it is plain state without locks, changed on the manager's loop alone.
"""
