import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import fk_steering as fk_config
from experiments import fk_images
from jaxml25.diffusion import networks, schedules
from jaxml25.training import mesh
from jaxml25.training.workdir import Workdir

_PROMPTS = 3


@functools.cache
def load(reward_host: bool = False) -> fk_images.ImageModel:
    """A tiny UNet with class labels for prompts; bright images are rewarded, in proportion to the prompt's number."""
    network = networks.UNet2D(channels=(8, 16), blocks_per_level=1, num_classes=_PROMPTS)
    params = network.init(jax.random.key(0), jnp.zeros((1, 4, 4, 1)), jnp.zeros(1), jnp.zeros(1, jnp.int32))["params"]
    library = np if reward_host else jnp
    return fk_images.ImageModel(
        denoise=lambda x, t, cond: network.apply({"params": params}, x, t, cond),
        schedule=schedules.make_schedule("scaled_linear"),
        sample_shape=(4, 4, 1),
        prompts=jnp.arange(_PROMPTS),
        null_cond=jnp.array(_PROMPTS),
        reward=lambda images, prompt: (1 + prompt) * library.mean(images, axis=(1, 2, 3)),
        decode=lambda latents: latents / 2,
        reward_host=reward_host,
    )


def load_host() -> fk_images.ImageModel:
    return load(reward_host=True)


def _config(model: str):
    config = fk_config.get_config("paper").images
    config.update(model=model, particles=(1, 4), potentials=("diff",), steps=10, start=2, stop=8, every=2, microbatch=2)
    return config


def test_a_model_that_is_brought_along_is_steered_for_every_prompt(tmp_path):
    name = f"{__name__}:load"
    rows = {}
    for loader in ("load", "load_host"):
        workdir = Workdir(tmp_path / loader)
        outcome = fk_images.run(_config(f"{__name__}:{loader}"), 0, workdir, mesh.make_mesh({"data": -1}))
        rows[loader] = [claim.measured for claim in outcome["claims"]]
        assert (tmp_path / loader / "figures" / "images.png").stat().st_size > 0
        assert outcome["claims"][0].holds, f"steering with {name} earns more than the best of 4"
    np.testing.assert_allclose(rows["load"], rows["load_host"], rtol=1e-5)


def test_a_model_that_is_not_named_is_an_error_that_says_what_is_expected(tmp_path):
    with pytest.raises(ValueError, match=r"config.images.model must be 'module:function'.*got ''"):
        fk_images.run(fk_config.get_config("paper").images, 0, Workdir(tmp_path), mesh.make_mesh({"data": -1}))
