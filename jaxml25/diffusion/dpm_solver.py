"""DPM-Solver, DPM-Solver++ and their stochastic form: multistep solvers in the logarithm of the signal-to-noise ratio.

With x = a x_0 + s eps, l = log(a / s), primes for the level arrived at and h = l' - l, the ODE is linear but for the
network, whose output D (x_0 for ++, eps without) is extrapolated from the last one, two or three calls:

    ++     x' = (s'/s) x + a' [f1 D0 + c1 D1 + c2 D2],          f1 = 1 - exp(-h)
    SDE    x' = (s'/s) exp(-h) x + a' [f1 D0 + c1 D1] + s' sqrt(f1) z,    f1 = 1 - exp(-2h)
    plain  x' = (a'/a) x - [f1 D0 + c1 D1 + c2 D2],             f1 = s' (exp(h) - 1) = a' s / a - s'

where D1, D2 are divided differences and c1 is f1 / 2 (midpoint) or the exact integral of a linear D (heun).

References: C. Lu et al., "DPM-Solver" (2206.00927) and "DPM-Solver++" (2211.01095).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxml25.diffusion import checks, predictions
from jaxml25.diffusion.samplers import Clip, Step, as_clip, static
from jaxml25.diffusion.schedules import Grid, SigmaGrid, Values, safe_sqrt

ALGORITHMS = ("dpmsolver++", "sde-dpmsolver++", "dpmsolver")
SOLVERS = ("midpoint", "heun")
_FEW_STEPS = 15  # below this many, the last two steps lower their order


class State(NamedTuple):
    """What a multistep solver remembers, newest first."""

    outputs: Float[Array, "order-1 batch *dims"]
    log_snrs: Float[Array, "order-1"]
    count: Int[Array, ""]  # steps taken
    num_steps: Int[Array, ""]  # steps in all, or -1 if that was not said


class Levels(NamedTuple):
    """Signal a, noise s and l = log(a / s) where a step starts and where it arrives."""

    a: Array
    s: Array
    log_snr: Array
    a_next: Array
    s_next: Array
    log_snr_next: Array


def levels(row: Grid | SigmaGrid) -> Levels:
    """Reads a grid's row; l stays finite (within the float's range) at pure data and at pure noise."""
    if isinstance(row, SigmaGrid):
        one = jnp.ones_like(row.sigma)
        return Levels(one, row.sigma, -_log(row.sigma), one, row.sigma_next, -_log(row.sigma_next))
    ends = [(jnp.sqrt(ab), safe_sqrt(1 - ab), 0.5 * (_log(ab) - _log(1 - ab))) for ab in (row.ab, row.ab_prev)]
    return Levels(*ends[0], *ends[1])


def _log(x: Array) -> Array:
    return jnp.log(jnp.maximum(x, jnp.finfo(x.dtype).tiny))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DpmSolver(Step):
    """See `dpmpp`."""

    order: int = static(2)
    solver: str = static("midpoint")
    algorithm: str = static("dpmsolver++")
    lower_order_final: bool = static(True)

    space = "both"

    @property
    def stochastic(self) -> bool:
        """Whether this is the SDE solver."""
        return self.algorithm == "sde-dpmsolver++"

    def check(self, grid: Any) -> None:
        """Checks a grid.

        Raises:
          ValueError: where ab is 0 and either the network or the algorithm works with eps.
        """
        super().check(grid)
        if self.algorithm == "dpmsolver" and not hasattr(grid, "sigma"):
            predictions.check_terminal_snr(grid.ab, "epsilon")

    def init(self, x: Values, num_steps: int | None = None) -> State:
        """Starts with nothing remembered.

        Args:
          x: the state to come.
          num_steps: steps in all, so that the last ones can lower their order; unknown, only a step to clean data does.
        """
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        return State(
            outputs=jnp.zeros((self.order - 1, *x.shape), x.dtype),
            log_snrs=jnp.zeros(self.order - 1, dtype),
            count=jnp.zeros((), jnp.int32),
            num_steps=jnp.asarray(-1 if num_steps is None else num_steps, jnp.int32),
        )

    def __call__(
        self, x: Values, pred: Values, row: Grid | SigmaGrid, noise: Values, state: State
    ) -> tuple[Array, State, Array]:
        """Takes one step; see the module's equations. Returns the next state x, what to remember, and x_0."""
        x0, eps = self.read(x, pred, row)
        at = levels(row)
        if self.algorithm == "dpmsolver" and self.clip is not None:
            eps = (x - at.a * x0) / at.s
        output = eps if self.algorithm == "dpmsolver" else x0
        order = self._order_now(at, state)
        d1, d2 = self._differences(output, at, state, order)
        x_next = self._update(x, output, d1, d2, noise, at, order)
        return x_next.astype(x.dtype), self._remember(state, output, at), x0.astype(x.dtype)

    def _order_now(self, at: Levels, state: State) -> Array:
        order = jnp.minimum(self.order, state.count + 1)
        order = jnp.where(at.s_next > 0, order, 1)
        if not self.lower_order_final:
            return order
        left = state.num_steps - state.count
        few = (state.num_steps >= 0) & (state.num_steps < _FEW_STEPS)
        return jnp.where(few, jnp.minimum(order, left), order)

    def _differences(self, output: Values, at: Levels, state: State, order: Array) -> tuple[Array, Array]:
        """First and second divided differences of the output in l, in units of this step; 0 above the order."""
        zero = jnp.zeros_like(output)
        if self.order == 1:
            return zero, zero
        h = at.log_snr_next - at.log_snr
        # What has not been remembered yet is not used, but must not divide by zero.
        r0 = jnp.where(state.count >= 1, (at.log_snr - state.log_snrs[0]) / h, 1)
        near = (output - state.outputs[0]) / r0
        d1, d2 = near, zero
        if self.order == 3:
            r1 = jnp.where(state.count >= 2, (state.log_snrs[0] - state.log_snrs[1]) / h, 1)
            far = (state.outputs[0] - state.outputs[1]) / r1
            d1 = jnp.where(order == 3, near + r0 / (r0 + r1) * (near - far), near)
            d2 = jnp.where(order == 3, (near - far) / (r0 + r1), 0)
        return jnp.where(order >= 2, d1, 0), d2

    def _update(self, x: Values, output: Values, d1: Array, d2: Array, noise: Values, at: Levels, order: Array) -> Array:
        h = at.log_snr_next - at.log_snr
        if self.algorithm == "sde-dpmsolver++":
            f1 = -jnp.expm1(-2 * h)
            c1 = 0.5 * f1 if self.solver == "midpoint" else 1 - f1 / (2 * h)
            decay = at.s_next / at.s * jnp.exp(-h)
            return decay * x + at.a_next * (f1 * output + c1 * d1) + at.s_next * safe_sqrt(f1) * noise
        if self.algorithm == "dpmsolver++":
            f1 = -jnp.expm1(-h)
            exact, c2 = 1 - f1 / h, 0.5 - (h - f1) / h**2
            c1 = self._first_difference_weight(0.5 * f1, exact, order)
            return at.s_next / at.s * x + at.a_next * (f1 * output + c1 * d1 + c2 * d2)
        f1 = at.a_next * at.s / at.a - at.s_next
        exact, c2 = f1 / h - at.s_next, (f1 - at.s_next * h) / h**2 - 0.5 * at.s_next
        c1 = self._first_difference_weight(0.5 * f1, exact, order)
        return at.a_next / at.a * x - (f1 * output + c1 * d1 + c2 * d2)

    def _first_difference_weight(self, midpoint: Array, exact: Array, order: Array) -> Array:
        """The third-order update integrates D1 exactly; the second-order one as `solver` says."""
        return exact if self.solver == "heun" else jnp.where(order == 3, exact, midpoint)

    def _remember(self, state: State, output: Values, at: Levels) -> State:
        keep = self.order - 1
        outputs = jnp.concatenate([jnp.asarray(output, state.outputs.dtype)[None], state.outputs])[:keep]
        log_snrs = jnp.concatenate([at.log_snr[None].astype(state.log_snrs.dtype), state.log_snrs])[:keep]
        return State(outputs, log_snrs, state.count + 1, state.num_steps)


def dpmpp(
    order: int = 2,
    solver: str = "midpoint",
    algorithm: str = "dpmsolver++",
    prediction_type: str = "epsilon",
    clip: Clip = None,
    *,
    lower_order_final: bool = True,
) -> DpmSolver:
    """A multistep solver: `step(x, pred, row, noise, state) -> (x_next, state, x0_hat)`, from `step.init(x, num_steps)`.

    It walks a `Grid` (best with `spacing="linspace_dpm", previous="next"`) or a `SigmaGrid`. The first step is of first
    order and the second at most of second. A step that arrives at clean data is of first order and returns x_0 exactly.

    Args:
      order: 1, 2 or 3; at most 2 for the SDE.
      solver: `midpoint` or `heun`, two second-order updates.
      algorithm: `dpmsolver++`, `sde-dpmsolver++` (uses the noise) or `dpmsolver`, which should end at a positive noise level
        (`final="alpha0"`).
      prediction_type: one of `predictions.PREDICTION_TYPES`.
      clip: see `samplers.ddpm`.
      lower_order_final: with fewer than 15 steps, take the last one at order 1 and the one before at most at order 2.

    Raises:
      ValueError: for an order or a name out of the list, or a range that is not positive.
    """
    checks.one_of("algorithm", algorithm, ALGORITHMS)
    checks.one_of("solver", solver, SOLVERS)
    checks.one_of("prediction_type", prediction_type, predictions.PREDICTION_TYPES)
    highest = 2 if algorithm == "sde-dpmsolver++" else 3
    if order not in range(1, highest + 1):
        raise ValueError(f"order must be from 1 to {highest} for algorithm {algorithm!r}, got {order}")
    return DpmSolver(
        prediction_type=prediction_type,
        clip=as_clip(clip),
        order=order,
        solver=solver,
        algorithm=algorithm,
        lower_order_final=lower_order_final,
    )
