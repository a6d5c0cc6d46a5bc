r"""Draws of the joint law of arXiv 2608.10605 that respect its ridge: a reconstruction.

The paper prints a 95 % interval for each coefficient of Table 2, from refits that start at the
fitted point, and says that they understate the spread along a ridge on which coefficients trade
off. Draws of each coefficient from its interval would leave that ridge, and say nothing of how far
along it the runs let the law move. `published_ensemble` uses no printed interval. It asks which
laws the runs could not have told from the printed one:

1. the runs are those that Appendix C allows (:mod:`lawfit.published_runs`, ASSUMED), their losses
   those of the printed law;
2. the error of a run is normal in ``log L``, with the variance that the printed
   ``R^2 = 0.99877`` leaves: ``sigma^2 = (1 - R^2) Var(log L) n / (n - 11)``, (0.37 %)^2;
3. before the runs, every law with terms at least 0 and exponents above 0 is as likely as another:
   flat in the terms at the centre of the runs and in the exponents. The signs are the paper's
   ("monotone-decreasing in N_tot, D and G, convex in S");
4. each draw is the end of its own Markov chain of `STEPS` steps at this density,

       log p(theta) = -1/2 sum_i n_i (log L_theta(x_i) - log L_0(x_i))^2 / sigma^2 + const,

   whose moves come from the Gauss-Newton covariance ``sigma^2 (J' n J)^-1`` at the printed law
   (Laplace's approximation), and are accepted or not by Metropolis and Hastings (Biometrika 57:97,
   1970): half of them independent of the chain's place, half steps from it. The covariance makes
   the moves follow the ridge; the acceptance makes them right where the ridge bends.

The moves are in the terms at the centre and their slopes there, ``A alpha`` in place of ``alpha``,
in which the ridge is nearly straight; ``1 / (A B C J^3)`` turns the density into that of these.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lawfit._values import FloatArray, LawError
from lawfit.ensemble import LawEnsemble
from lawfit.laws import JointLaw
from lawfit.published import MOSAIC_TABLE2
from lawfit.published_runs import N_RUNS, run_design

__all__ = ["R_SQUARED", "STEPS", "published_ensemble"]

R_SQUARED = 0.99877
"""Of the joint law over all runs, Figure 7 of arXiv 2608.10605."""

STEPS = 300
"""Moves of a chain; the correlation of a coefficient with its start is then below 0.1."""

MAX_DRAWS = 100_000

_STEP, _INDEPENDENT = 0.55, 1.1
"""Scale of the two kinds of moves, over the Gauss-Newton covariance's."""

_N_COEFFICIENTS = 11

METHOD = (
    "reconstruction of what the runs leave open: ends of Metropolis chains over a design of runs "
    "from Appendix C, with the residual of R^2 = 0.99877 and terms of the printed signs; the "
    "printed intervals play no part"
)


class _Density:
    """The density of the law's coefficients, in the coordinates of the moves.

    A point has the terms of capacity, data, sparsity and interaction at the centre of the runs,
    the constant, and the slopes ``A alpha, B beta, C lambda, J delta, J gamma, J eta``.
    """

    def __init__(self) -> None:
        law, design = MOSAIC_TABLE2, run_design()
        logs = np.log([design.n_total, design.n_active / design.n_total, design.expert_split])
        data = np.log(design.tokens)
        self.runs = design.runs
        self.centre = (logs * self.runs).sum(axis=1) / self.runs.sum()
        self.centre_data = float((data * self.runs).sum() / self.runs.sum())
        # runs of one model differ in tokens alone: each term once a model, or once a token count
        models, self.model = np.unique(logs - self.centre[:, None], axis=1, return_inverse=True)
        self.size, self.active, self.split = models
        self.data, self.level = np.unique(data - self.centre_data, return_inverse=True)
        self.sigma = residual()
        size, active, split = self.centre
        a = law.a * np.exp(-law.alpha * size)
        b = law.b * np.exp(-law.beta * self.centre_data)
        c = law.c * np.exp(-law.lambda_ * active)
        j = law.j * np.exp(-law.delta * active - law.gamma * size - law.eta * split)
        slopes = [a * law.alpha, b * law.beta, c * law.lambda_]
        slopes += [j * law.delta, j * law.gamma, j * law.eta]
        self.printed = np.array([a, b, c, j, law.e, *slopes])
        self.log_loss = np.log(self.loss(self.printed[None]))[0]

    def terms(self, points: FloatArray) -> tuple[FloatArray, ...]:
        """Return the four terms that vary: of models, (points, models), the second of tokens."""
        a, b, c, j, _, alpha, beta, lam, delta, gamma, eta = (
            column[:, None] for column in points.T
        )
        with np.errstate(over="ignore"):
            return (
                a * np.exp(-alpha / a * self.size),
                b * np.exp(-beta / b * self.data),
                c * np.exp(-lam / c * self.active),
                j * np.exp(-(delta * self.active + gamma * self.size + eta * self.split) / j),
            )

    def loss(self, points: FloatArray) -> FloatArray:
        """Return the loss of every run [nats/token], shape (points, runs)."""
        a, b, c, j = self.terms(points)
        return np.asarray((a + c + j + points[:, 4:5])[:, self.model] + b[:, self.level])

    def log_density(self, points: FloatArray) -> FloatArray:
        """Return the logarithm of the density, but for a constant; -inf outside the support."""
        inside = (points > 0.0).all(axis=1)
        found = np.full(len(points), -np.inf)
        if inside.any():
            at = points[inside]
            misfit = (np.log(self.loss(at)) - self.log_loss) / self.sigma
            found[inside] = -0.5 * (misfit * misfit * self.runs).sum(axis=1)
            found[inside] -= np.log(at[:, :4]).sum(axis=1) + 2.0 * np.log(at[:, 3])
        return found

    def covariance(self) -> FloatArray:
        """Return ``sigma^2 (J' n J)^-1`` at the printed law, shape (11, 11)."""
        point = self.printed
        a, b, c, j = (term[0] for term in self.terms(point[None]))
        alpha, beta, lam = point[5:8] / point[:3]
        along = -(point[8] * self.active + point[9] * self.size + point[10] * self.split) / point[3]
        of_models = {
            0: a / point[0] * (1.0 + alpha * self.size),
            2: c / point[2] * (1.0 + lam * self.active),
            3: j / point[3] * (1.0 - along),
            4: np.ones_like(a),
            5: -a / point[0] * self.size,
            7: -c / point[2] * self.active,
            8: -j / point[3] * self.active,
            9: -j / point[3] * self.size,
            10: -j / point[3] * self.split,
        }
        of_tokens = {
            1: b / point[1] * (1.0 + beta * self.data),
            6: -b / point[1] * self.data,
        }
        columns = {k: v[self.model] for k, v in of_models.items()}
        columns |= {k: v[self.level] for k, v in of_tokens.items()}
        jacobian = np.array([columns[k] for k in range(_N_COEFFICIENTS)]) / np.exp(self.log_loss)
        fisher = np.einsum("ir,jr,r->ij", jacobian, jacobian, self.runs) / self.sigma**2
        scale = 1.0 / np.sqrt(np.diag(fisher))  # coordinates of one size, so that it inverts well
        return np.asarray(np.linalg.inv(fisher * np.outer(scale, scale)) * np.outer(scale, scale))

    def law(self, point: FloatArray) -> JointLaw:
        """Return a point as a law in raw units."""
        size, active, split = self.centre
        a, b, c, j, e = (float(x) for x in point[:5])
        alpha, beta, lam = (float(x) for x in point[5:8] / point[:3])
        delta, gamma, eta = (float(x) for x in point[8:] / point[3])
        return JointLaw(
            a=a * float(np.exp(alpha * size)),
            b=b * float(np.exp(beta * self.centre_data)),
            c=c * float(np.exp(lam * active)),
            j=j * float(np.exp(delta * active + gamma * size + eta * split)),
            e=e,
            alpha=alpha,
            beta=beta,
            lambda_=lam,
            delta=delta,
            gamma=gamma,
            eta=eta,
            source=f"a draw around {MOSAIC_TABLE2.source}",
            valid_range=MOSAIC_TABLE2.valid_range,
            shape_range=MOSAIC_TABLE2.shape_range,
        )


def residual() -> float:
    """Return the residual of a run's ``log L`` that the printed R^2 leaves, relative [-]."""
    law, design = MOSAIC_TABLE2, run_design(fitted=False)
    losses = np.log(
        law.loss(
            n_total=design.n_total,
            n_active=design.n_active,
            tokens=design.tokens,
            expert_split=design.expert_split,
        )
    )
    mean = float((design.runs * losses).sum()) / N_RUNS
    variance = float((design.runs * (losses - mean) ** 2).sum()) / N_RUNS
    freedom = N_RUNS / (N_RUNS - _N_COEFFICIENTS)
    return float(np.sqrt((1.0 - R_SQUARED) * variance * freedom))


def published_ensemble(
    draws: int, seed: int, *, progress: Callable[[int, int], None] | None = None
) -> LawEnsemble:
    """Draw laws that the runs behind `MOSAIC_TABLE2` could not have told from it.

    Parameters
    ----------
    draws : int
        How many, at least 1.
    seed : int
        Of the generator; the same seed and number give the same draws.
    progress : callable, optional
        Called with the moves done, and their number.

    Returns
    -------
    LawEnsemble
        Of `JointLaw`; the spread is ASSUMED, as the module says.

    Raises
    ------
    LawError
        ``draws`` is out of range.
    """
    if not 1 <= draws <= MAX_DRAWS:
        near = min(max(draws, 1), MAX_DRAWS)
        raise LawError(f"draws is {draws}, but must be 1 to {MAX_DRAWS}; the nearest is {near}.")
    density = _Density()
    root = np.linalg.cholesky(density.covariance())
    inverse = np.linalg.inv(root)
    generator = np.random.default_rng(seed)
    printed = density.printed
    points = np.repeat(printed[None], draws, axis=0)
    height = density.log_density(points)
    for step in range(STEPS):
        z = generator.standard_normal((draws, _N_COEFFICIENTS))
        moves = np.einsum("ij,dj->di", root, z)
        if step % 2:
            proposed, correction = points + _STEP * moves, 0.0
        else:
            proposed = printed + _INDEPENDENT * moves
            here = np.einsum("ij,dj->di", inverse, points - printed) / _INDEPENDENT
            correction = 0.5 * ((z * z).sum(axis=1) - (here * here).sum(axis=1))
        level = density.log_density(proposed)
        taken = np.log1p(-generator.random(draws)) < level - height + correction
        points = np.where(taken[:, None], proposed, points)
        height = np.where(taken, level, height)
        if progress is not None:
            progress(step + 1, STEPS)
    return LawEnsemble(
        laws=tuple(density.law(point) for point in points),
        source=MOSAIC_TABLE2.source,
        method=METHOD,
        basis="ASSUMED",
        seed=seed,
    )
