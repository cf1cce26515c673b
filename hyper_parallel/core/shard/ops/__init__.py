"""Operator families. Every module here is imported once by the register; the tables are in ``yaml/<backend>``."""
