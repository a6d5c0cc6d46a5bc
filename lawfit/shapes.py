"""The shape of the models that a law was fitted on, and the flags of a model of another shape.

A law knows a model by its counts alone. Two models of equal counts can still differ in depth, in
width of heads or of feed-forward blocks; runs of one family say nothing of how much that matters.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from lawfit.validity import Interval

_MEANING: Mapping[str, str] = {
    "aspect_ratio": "d_model / n_layers",
    "ff_ratio": "d_ff / d_model",
    "head_dim": "width of a head",
    "n_kv_heads": "key and value heads",
    "shared_experts": "d_shared / d_expert",
    "first_k_dense": "leading dense layers",
}


class ShapeRange(BaseModel):
    """Smallest and largest value of each ratio of sizes over the training runs of a law.

    A ratio left at None carries no statement, and is never flagged.

    Attributes
    ----------
    aspect_ratio
        ``d_model / n_layers`` [-].
    ff_ratio
        ``d_ff / d_model`` [-].
    head_dim
        Width of a head [-].
    n_kv_heads
        Heads of keys and values [-].
    shared_experts
        ``d_shared / d_expert`` [-].
    first_k_dense
        Leading dense layers [-].
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    aspect_ratio: Interval | None = None
    ff_ratio: Interval | None = None
    head_dim: Interval | None = None
    n_kv_heads: Interval | None = None
    shared_experts: Interval | None = None
    first_k_dense: Interval | None = None

    def flags(self, shape: Mapping[str, float]) -> tuple[str, ...]:
        """Name every ratio of a model that lies outside the range.

        Parameters
        ----------
        shape
            Ratios by the name of their field [-]; one that the model does not have (the width of
            a dense block that it lacks) is left out, and never flagged.

        Returns
        -------
        tuple of str
            One sentence for each ratio outside, with its value and the range.
        """
        found = []
        for name, meaning in _MEANING.items():
            interval, value = getattr(self, name), shape.get(name)
            if interval is None or value is None or interval[0] <= value <= interval[1]:
                continue
            low, high = interval
            family = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            found.append(
                f"shape outside the family it was fitted on: {name} ({meaning}) is {value:.4g}, "
                f"and {family} in its runs."
            )
        return tuple(found)
