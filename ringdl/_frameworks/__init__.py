"""How arrays of each framework are read and made: one module for each, none imported unasked.

Each module is a `ringdl._arrays.Framework`, and imports its own framework alone, which is already
imported where an array of it exists.
"""
