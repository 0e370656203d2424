"""The options of Feynman-Kac steering, checked before any work; see `fk_steering`."""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool

from jaxml25.diffusion import checks, potentials, resampling
from jaxml25.diffusion.schedules import Scalar

VARIANTS = ("smc", "reference_image", "reference_text")
OUTPUTS = ("best", "sample", "weighted", "resampled")


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of `fk_steering.run`.

    Attributes:
      potential: `diff`, `max`, `add`, `rt`, `is` (importance sampling: nothing is scored before the end), `bon` (best-of-n:
        independent samples, sorted by reward), or a `potentials.Potential` of your own.
      lam: strength lambda of the tilt, finite; may be traced.
      resample: a scheme of `resampling.SCHEMES`, or a function `(key, log_weights, num) -> ancestors` of your own.
      every: score every so many steps, from `start` to at most `stop`; -1 for none. The last step is always scored.
      start: first scored step, counted from 0 in running order.
      stop: last step that may be scored by `every`.
      ess_threshold: resample when the effective sample size falls below this share of K, in (0, 1]; the last step then
        resamples only if `output` is `resampled`. None resamples at every scored step, the last one included. May be traced.
      r_min: reward from which `diff`, `max` and `add` start. `max` clips every reward below it: set it for negative rewards.
      variant: `smc` is exact. `reference_image` and `reference_text` decide as the published code (`fk_reference`), and
        need `multinomial`; `reference` alone is `reference_image`.
      output: what `fk_steering.output` makes of a result: the `best` particle, a `sample` by weight, all as they are
        (`weighted`), or all with equal weights (`resampled`). The result itself always has all particles.
      reward_at: `prev` scores the prediction that was made on the way to x_t, from x_{t+1}, at no further cost; `current`
        the prediction from x_t, at one more network call per particle and scored step.
      num_x0_samples: clean samples per particle and scored step, for kernels that draw them (`from_masked`).
      logmeanexp_lambda: combine these samples' rewards by (1 / lambda) log mean exp(lambda r), a consistent estimate of the
        value function, rather than by log mean exp(r).

    Raises:
      ValueError: for an unknown name, `every` 0 or below -1, `stop` before `start`, `ess_threshold` outside (0, 1], lam or
        r_min not finite, `num_x0_samples` below 1, or a reference variant with another scheme than `multinomial`.
    """

    potential: str | potentials.Potential = "diff"
    lam: Scalar = 10.0
    resample: str | resampling.Scheme = "systematic"
    every: int | np.integer = 20
    start: int | np.integer = 20
    stop: int | np.integer = 80
    ess_threshold: Scalar | None = 0.5
    r_min: Scalar = 0.0
    variant: str = "smc"
    output: str = "best"
    reward_at: str = "prev"
    num_x0_samples: int = 4
    logmeanexp_lambda: bool = False

    def __post_init__(self):
        potentials.get(self.potential)
        resampling.get(self.resample)
        if self.variant == "reference":
            object.__setattr__(self, "variant", "reference_image")
        checks.one_of("variant", self.variant, VARIANTS)
        checks.one_of("output", self.output, OUTPUTS)
        checks.one_of("reward_at", self.reward_at, ("prev", "current"))
        for name in ("lam", "r_min"):
            value = getattr(self, name)
            if checks.is_concrete(value) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if self.every < -1 or self.every == 0:
            raise ValueError(f"every must be positive, or -1 for none, got {self.every}")
        if self.every > 0 and self.stop < self.start:
            raise ValueError(f"stop must be at least start = {self.start}, got {self.stop}")
        threshold = self.ess_threshold
        if threshold is not None and checks.is_concrete(threshold) and not 0 < threshold <= 1:
            raise ValueError(f"ess_threshold must be in (0, 1], got {self.ess_threshold}")
        if self.num_x0_samples < 1:
            raise ValueError(f"num_x0_samples must be at least 1, got {self.num_x0_samples}")
        if self.variant != "smc":
            if self.resample != "multinomial":
                raise ValueError(f"resample must be 'multinomial' with variant {self.variant!r}, got {self.resample!r}")
            if isinstance(self.potential, potentials.Potential):
                raise ValueError(f"potential must be a name with variant {self.variant!r}, got {self.potential}")


def scored_steps(config: Config, num_steps: int) -> Bool[np.ndarray, "{num_steps}"]:
    """Which steps are scored and may resample: start, start + every, ... <= stop, and the last.

    Raises:
      ValueError: if one of them lies outside [0, num_steps). The reference variants leave those out, as their code does.
    """
    scored = np.zeros(num_steps, bool)
    scored[-1] = True
    if config.every > 0 and config.potential not in ("is", "bon"):
        steps = np.arange(config.start, config.stop + 1, config.every)
        inside = (steps >= 0) & (steps < num_steps)
        if config.variant == "smc" and not np.all(inside):
            raise ValueError(
                f"start, stop and every must keep the scored steps in [0, {num_steps}), got {config.start}, {config.stop} "
                f"and {config.every}, which is {steps.tolist()}"
            )
        scored[steps[inside]] = True
    return scored
