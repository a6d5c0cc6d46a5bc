"""What follows from one survey of the candidates, because MFU* does not depend on the window.

`phases` has the optimum of every window, `inverse` the window for a loss, `regime` the allocation
laws of Appendix D of arXiv 2608.10605, whose equations are in `kkt`.
"""

from __future__ import annotations
