"""What does each block of this encoder know?"""

__version__ = "0.2.0"
