"""Feynman-Kac steering: particles that are scored while they denoise (arXiv 2501.06848).

Three miniatures and the publication's image runs:

- `gaussian` (seconds): a rare event under a sampler whose law is known, where the tilted mean and the normaliser have closed forms.
  Expect the error of the tilted mean to fall from 0.53 with importance sampling to 0.24 with 16 particles.
- `digits` (a minute): a denoiser trained on scikit-learn's digits, steered by a classifier towards one class it was not told of.
  Expect 4 particles to earn more reward than the best of 8 independent samples.
- `text` (a minute): a masked character model of Python's documentation, steered towards likely text and towards a rare attribute.
  Expect 8 particles to show the attribute three times as often as the best of 8.
- `paper`: K = 4, the `max` potential, lambda = 10, 100 DDIM steps with eta = 1, scored at 20, 40, 60, 80 and the last, on a
  pretrained text-to-image model that you bring as `config.images.model = "your_module:load"` (see `experiments/fk_images.py`).

`small` runs the three miniatures in about three minutes on two CPU cores; `smoke` is what the tests run.

    python experiments/launch.py --config=configs/fk_steering.py:small --workdir=runs/fk_steering
"""

from ml_collections import ConfigDict

VARIANTS = ("smoke", "small", "paper")


def get_config(variant: str = "small") -> ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    smoke = variant == "smoke"
    config = ConfigDict()
    config.experiment = "fk_steering"
    config.variant = variant
    config.seed = 0
    config.mesh = {"data": -1}
    config.parts = ("images",) if variant == "paper" else ("gaussian", "digits", "text")
    config.gaussian = gaussian(smoke)
    config.digits = digits(smoke)
    config.train = config.digits.train  # the same object: the digits model is what this experiment trains first of all
    config.text = text(smoke)
    config.images = images()
    return config


def gaussian(smoke: bool) -> ConfigDict:
    return ConfigDict(
        {
            "particles": (4, 16) if smoke else (4, 16, 64),
            "runs": 50 if smoke else 2_000,
            "data_mean": 0.3,
            "data_variance": 0.6,  # the 50-step sampler's law is then N(0.299, 0.523)
            "steps": 50,
            "every": 5,
            "reward_at": "current",
            "lam": 2.0,
            "deviations": 4.0,
        }
    )


def digits(smoke: bool) -> ConfigDict:
    return ConfigDict(
        {
            "train": {
                "steps": 20 if smoke else 2_500,
                "batch_size": 32 if smoke else 128,
                "checkpoint_every": 10 if smoke else 1_000,
                "log_every": 5 if smoke else 100,
                "ema_decay": 0.999,
                "p_uncond": 0.2,
            },
            "optimiser": {
                "name": "adamw",
                "learning_rate": 2e-3,
                "schedule": "cosine",
                "warmup_steps": 200,
                "clip_norm": 1.0,
            },
            "network": {"width": 32 if smoke else 256, "blocks": 1 if smoke else 3},
            "particles": (1, 2) if smoke else (1, 2, 4, 8),
            "repeats": 1 if smoke else 10,
            "seeds": (0,) if smoke else (0, 1, 2),
            "steps": 10 if smoke else 50,
            "every": 5,
            "lam": 10.0,
            "ess_threshold": 1.0,  # resample whenever the weights differ: two particles never have an ESS below 1 = K / 2
            "r_min": -20.0,  # log-probabilities: `max` would clip all of them at 0
            "guidance": 1.0,
        }
    )


def text(smoke: bool) -> ConfigDict:
    return ConfigDict(
        {
            "train": {
                "steps": 10 if smoke else 350,
                "batch_size": 8 if smoke else 32,
                "stride": 16,
                "checkpoint_every": 5 if smoke else 200,
                "log_every": 5 if smoke else 50,
                "ema_decay": 0.99,
            },
            "optimiser": {
                "name": "adamw",
                "learning_rate": 3e-3,
                "schedule": "cosine",
                "warmup_steps": 30,
                "clip_norm": 1.0,
                "b2": 0.98,  # with 0.999 the first thousand steps stay near the unigram law
            },
            "network": {
                "hidden": 16 if smoke else 128,
                "layers": 1,
                "heads": 2 if smoke else 4,
                "window": 3 if smoke else 9,
                "use_time": False,
            },
            "length": 16 if smoke else 64,
            "particles": (1, 2) if smoke else (1, 4, 8),
            "repeats": 2 if smoke else 16,
            "seeds": (0,) if smoke else (0, 1, 2),
            "steps": 4 if smoke else 16,
            "every": 2,
            "num_x0_samples": 16,
            "ess_threshold": 0.5,  # early rewards are noisy: resampling on every difference would follow the noise
            "lam": {"likely": 30.0, "three": 5.0},
        }
    )


def images() -> ConfigDict:
    return ConfigDict(
        {
            "model": "",
            "particles": (1, 2, 4, 8),
            "potentials": ("diff", "max"),
            "steps": 100,
            "eta": 1.0,
            "lam": 10.0,
            "r_min": -10.0,  # ImageReward is often negative, and `max` clips at r_min
            "start": 20,
            "stop": 80,
            "every": 20,
            "guidance": 7.5,
            "microbatch": 4,
        }
    )
