"""The version of this suite; a module of its own, so that nothing imports the package's front."""

__version__ = "0.2.0"
