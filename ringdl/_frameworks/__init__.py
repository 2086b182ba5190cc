"""How arrays of each framework are seen and made: one module for each, none imported unasked.

Each module is a `ringdl._arrays.Framework`, and imports its own framework alone, which must have
been imported by whoever has made an array of it.
"""
