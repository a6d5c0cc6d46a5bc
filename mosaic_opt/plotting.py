"""The optional library of figures, imported when one is asked for."""

from __future__ import annotations

from typing import Any

from mosaic_opt.errors import MosaicError


def require_plotly() -> tuple[Any, Any]:
    """Return plotly's graph objects and its function that makes subplots.

    Raises
    ------
    MosaicError
        plotly is not installed.
    """
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError:
        raise MosaicError(
            "A figure needs plotly: pip install 'mosaic-opt[studio]'; the table needs nothing."
        ) from None
    return graph_objects, make_subplots
