"""What does each block of this encoder know?"""

__version__ = "0.1.0"
