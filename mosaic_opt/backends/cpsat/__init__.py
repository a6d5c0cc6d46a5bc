"""Searches with OR-Tools CP-SAT, the only part of the library that imports ``ortools``.

`search` holds the backend of :func:`mosaic_opt.solver.solve`, `stages` the search of
:mod:`mosaic_opt.stage_search`. Modules that need ``ortools`` import it when they run.
"""
