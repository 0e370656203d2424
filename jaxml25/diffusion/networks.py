"""Denoising networks: a UNet for images, a transformer for images or text, a perceptron for vectors.

All three are Flax Linen modules called as `module.apply({"params": params}, x, t, cond)`:

- `x` has the batch axis first: images are (batch, height, width, channels), text is integer tokens (batch, length), vectors
  are (batch, dim). The output has the shape of `x` (for text: one row of logits per token).
- `t` is a scalar or one time per example. It is multiplied by `time_scale` and embedded by sines and cosines whose periods
  run from 2 pi to 2 pi 10^4. Leave `time_scale` at 1 for the integer timesteps of a discrete schedule; set it to 1000 for
  times in [0, 1].
- `cond` is None, or class labels in [0, num_classes], or (`UNet2D` with `cond_dim`) an array of context tokens. Label
  `num_classes` is the null class, and None means that class for every example; classifier-free guidance trains by replacing
  labels with it at random.

The last layer starts at zero, so an untrained network predicts zero (for text: uniform probabilities), and its epsilon loss
is that of predicting nothing: 1. Time and class enter every block through its normalisation,

    h <- h + g * branch((1 + a) * norm(h) + b),    (a, b, g) = W silu(embedding of t and cond),    W = 0 at first,

with the gate g only in `DiT`; the other two start their blocks at the identity by a last layer of zeros or need no gate.

Compute precision follows the inputs and parameters. With `dtype=jnp.bfloat16` the layers compute in bfloat16, while
parameters, normalisation statistics, the softmax of attention, time embeddings and the output stay float32.

References: J. Ho, A. Jain and P. Abbeel, "Denoising Diffusion Probabilistic Models", arXiv 2006.11239 (UNet); W. Peebles and
S. Xie, "Scalable Diffusion Models with Transformers", arXiv 2212.09748 (DiT); J. Su et al., "RoFormer: Enhanced Transformer
with Rotary Position Embedding", arXiv 2104.09864 (rotary positions).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Shaped

Times = Shaped[Array, "batch"] | Shaped[Array, ""] | float | int

# For a mesh with an axis named "model": which dimension of a parameter, found by its path, is split over it. Attention is
# split by heads and the wide layers by their width, so that a block needs one sum over devices per branch.
SHARDING_RULES = {
    r".*(qkv|query|key_value)/kernel": (None, None, "model", None),
    r".*(qkv|query|key_value)/bias": (None, "model", None),
    r".*merge/kernel": ("model", None, None),
    r".*widen/kernel": (None, "model"),
    r".*widen/bias": ("model",),
    r".*narrow/kernel": ("model", None),
}


def timestep_embedding(t: Float[Array, "batch"], dim: int, max_period: float = 10_000.0) -> Float[Array, "batch dim"]:
    """Sines and cosines of t at `dim // 2` frequencies, geometric from 1 to 1 / `max_period`.

    Raises:
      ValueError: if `dim` is not even and positive.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"dim must be even and at least 2, got {dim}")
    frequencies = jnp.exp(-math.log(max_period) * jnp.arange(dim // 2, dtype=t.dtype) / (dim // 2))
    angles = t[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class UNet2D(nn.Module):
    """Convolutional encoder-decoder over NHWC images of any size.

    A level has `blocks_per_level` residual blocks; between levels the image is halved (rounding up) by a strided
    convolution, and on the way back doubled and cropped to the size it had.

    Attributes:
      channels: of each level, finest first; divisible by `groups`, and even.
      blocks_per_level: at least 1; one more on the way back.
      groups: of the group normalisations.
      self_attention: whether the coarsest level attends to itself.
      heads: of the attentions; divides the coarsest level's channels.
      cond_dim: if given, the coarsest level attends to context tokens `cond` of this width; None as `cond` then means one
        learned null token. To mix null and other contexts in a batch, pass the null context as an array like the others.
      num_classes: if given, `cond` is class labels.
      time_scale: see the module's docstring.
      dtype: of the computation; None follows the inputs and parameters.
    """

    channels: tuple[int, ...] = (64, 128, 256)
    blocks_per_level: int = 2
    groups: int = 8
    self_attention: bool = False
    heads: int = 4
    cond_dim: int | None = None
    num_classes: int | None = None
    time_scale: float = 1.0
    dtype: Any = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"], t: Times, cond: Shaped[Array, "batch ..."] | None = None
    ) -> Float[Array, "batch height width channels"]:
        """Predicts epsilon, x0 or v, whatever it is trained for; see the module's docstring.

        Raises:
          ValueError: if the options contradict each other, or `t` or `cond` does not fit them.
        """
        self._check(x)
        labels, context = self._split_cond(x, cond)
        embedding = TimeAndClass(
            4 * self.channels[0], self.channels[0], self.num_classes, self.time_scale, self.dtype, name="embedding"
        )(x, t, labels)
        conv = lambda width, name, **kw: nn.Conv(width, (3, 3), padding=1, dtype=self.dtype, name=name, **kw)
        block = lambda width, name: ResBlock(width, self.groups, self.dtype, name=name)
        deepest = len(self.channels) - 1

        h = conv(self.channels[0], "conv_in")(x)
        skips = [h]
        for level, width in enumerate(self.channels):
            for i in range(self.blocks_per_level):
                h = block(width, f"down_{level}_block_{i}")(h, embedding)
                if level == deepest:
                    h = self._attend(h, context, f"down_{level}_attention_{i}")
                skips.append(h)
            if level < deepest:
                h = conv(width, f"down_{level}_halve", strides=2)(h)
                skips.append(h)

        h = block(self.channels[-1], "middle_block_0")(h, embedding)
        h = self._attend(h, context, "middle_attention")
        h = block(self.channels[-1], "middle_block_1")(h, embedding)

        for level in range(deepest, -1, -1):
            for i in range(self.blocks_per_level + 1):
                h = block(self.channels[level], f"up_{level}_block_{i}")(
                    jnp.concatenate([h, skips.pop()], axis=-1), embedding
                )
                if level == deepest:
                    h = self._attend(h, context, f"up_{level}_attention_{i}")
            if level > 0:
                h = conv(self.channels[level], f"up_{level}_double")(_double(h, skips[-1].shape))

        h = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype, name="norm_out")(h))
        h = conv(x.shape[-1], "conv_out", kernel_init=nn.initializers.zeros)(h)
        return h.astype(_output_dtype(h))

    def _attend(self, h, context, name):
        if not self.self_attention and context is None:
            return h
        batch, height, width, channels = h.shape
        tokens = nn.GroupNorm(self.groups, dtype=self.dtype, name=f"{name}_norm")(h).reshape(batch, height * width, channels)
        if self.self_attention:
            tokens = tokens + Attention(self.heads, dtype=self.dtype, name=f"{name}_self")(tokens)
        if context is not None:
            tokens = tokens + Attention(self.heads, dtype=self.dtype, name=f"{name}_cross")(tokens, context)
        out = nn.Dense(channels, kernel_init=nn.initializers.zeros, dtype=self.dtype, name=f"{name}_out")
        return h + out(tokens).reshape(h.shape)

    def _split_cond(self, x, cond):
        """Class labels and context tokens; at most one of them is what `cond` is."""
        if self.cond_dim is None:
            return cond, None
        null = self.param("null_context", nn.initializers.normal(1.0), (1, 1, self.cond_dim))
        if cond is None:
            return None, jnp.broadcast_to(null, (x.shape[0], 1, self.cond_dim))
        if cond.ndim != 3 or cond.shape[::2] != (x.shape[0], self.cond_dim):
            raise ValueError(f"cond must be ({x.shape[0]}, tokens, cond_dim={self.cond_dim}), got {cond.shape}")
        return None, cond

    def _check(self, x):
        if self.blocks_per_level < 1:
            raise ValueError(f"blocks_per_level must be at least 1, got {self.blocks_per_level}")
        if not self.channels or any(width % self.groups or width % 2 for width in self.channels):
            raise ValueError(f"channels must be even and divisible by groups={self.groups}, got {self.channels}")
        if self.cond_dim is not None and self.num_classes is not None:
            raise ValueError(f"give cond_dim or num_classes, not both, got {self.cond_dim} and {self.num_classes}")


class DiT(nn.Module):
    """Transformer with adaptive layer normalisation, over the patches of an image or the tokens of a text.

    The text form for masked diffusion is `DiT(vocab=V)`: tokens in, V logits per token out.

    Attributes:
      hidden: width; divisible by `heads`.
      layers: number of blocks.
      heads: of the attention.
      patch: side of an image's patches; divides its height and width. Unused for text.
      vocab: number of tokens with the mask token; None means images.
      window: odd; text is embedded in windows of so many neighbouring tokens around each, as an image is in patches. Above
        1, short-range order needs no attention to be learned first.
      positions: "rope" rotates queries and keys (by row and column for images) and takes any length; "learned" adds a
        table of the length seen at initialisation.
      widening: width of the perceptrons, in units of `hidden`.
      num_classes: if given, `cond` is class labels.
      use_time: False ignores `t`, as masked diffusion may and `masked_sample_cached` requires.
      time_scale: see the module's docstring.
      dtype: of the computation; None follows the inputs and parameters.
    """

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    patch: int = 2
    vocab: int | None = None
    window: int = 1
    positions: str = "rope"
    widening: int = 4
    num_classes: int | None = None
    use_time: bool = True
    time_scale: float = 1.0
    dtype: Any = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch height width channels"] | Int[Array, "batch length"],
        t: Times,
        cond: Int[Array, "batch"] | None = None,
    ) -> Float[Array, "batch height width channels"] | Float[Array, "batch length vocab"]:
        """Predicts epsilon, x0 or v (images) or the clean tokens' logits (text); see the module's docstring.

        Raises:
          ValueError: if the options contradict each other, or `x`, `t` or `cond` does not fit them.
        """
        self._check(x)
        if self.vocab is None:
            h = nn.Dense(self.hidden, dtype=self.dtype, name="patches_in")(_to_patches(x, self.patch))
            rows, columns = (side // self.patch for side in x.shape[1:3])
            places = jnp.stack(jnp.meshgrid(jnp.arange(rows), jnp.arange(columns), indexing="ij"), -1).reshape(-1, 2)
        else:
            h = nn.Embed(
                self.vocab, self.hidden, embedding_init=nn.initializers.normal(1.0), dtype=self.dtype, name="tokens_in"
            )(x)
            if self.window > 1:
                h = h + nn.Dense(self.hidden, dtype=self.dtype, name="window_in")(_windows(h, self.window))
            places = jnp.arange(x.shape[1])[:, None]
        if self.positions == "learned":
            h = h + self._table(places.shape[0]).astype(h.dtype)
            places = None

        embedding = TimeAndClass(
            self.hidden, self.hidden, self.num_classes, self.time_scale, self.dtype, self.use_time, name="embedding"
        )(h, t, cond)
        if not self.use_time and self.num_classes is None:
            embedding = None
        for i in range(self.layers):
            h = DiTBlock(self.heads, self.widening, self.dtype, name=f"block_{i}")(h, embedding, places)

        scale, shift = _modulation(self, embedding, 2, self.hidden, "modulate_out")
        h = (1 + scale[:, None]) * _layer_norm(self.dtype, "norm_out")(h) + shift[:, None]
        outputs = self.vocab or self.patch**2 * x.shape[-1]
        h = nn.Dense(outputs, kernel_init=nn.initializers.zeros, dtype=self.dtype, name="out")(h)
        h = h.astype(_output_dtype(h))
        return h if self.vocab else _from_patches(h, x.shape, self.patch)

    def _table(self, length):
        stored = self.get_variable("params", "positions_in")
        if stored is not None and stored.shape[0] != length:
            raise ValueError(f"x must have {stored.shape[0]} tokens, the length of the learned positions, got {length}")
        return self.param("positions_in", nn.initializers.normal(0.02), (length, self.hidden))

    def _check(self, x):
        if self.positions not in ("rope", "learned"):
            raise ValueError(f"positions must be one of rope, learned, got {self.positions!r}")
        if self.window < 1 or self.window % 2 == 0:
            raise ValueError(f"window must be odd and at least 1, got {self.window}")
        if self.hidden % 2:
            raise ValueError(f"hidden must be even, got {self.hidden}")
        if self.vocab is None:
            if x.ndim != 4:
                raise ValueError(f"x must be (batch, height, width, channels) unless vocab is given, got {x.shape}")
            if x.shape[1] % self.patch or x.shape[2] % self.patch:
                raise ValueError(f"patch must divide the image's sides {x.shape[1:3]}, got {self.patch}")
        elif x.ndim != 2:
            raise ValueError(f"x must be tokens (batch, length) when vocab is given, got {x.shape}")


class MLPDenoiser(nn.Module):
    """Residual perceptron over vectors (flattened small images, points, table rows).

    Attributes:
      width: of the hidden layers; even.
      blocks: number of residual blocks.
      num_classes: if given, `cond` is class labels.
      embedding_dim: width of the embedding of time and class; even.
      time_scale: see the module's docstring.
      dtype: of the computation; None follows the inputs and parameters.
    """

    width: int = 256
    blocks: int = 3
    num_classes: int | None = None
    embedding_dim: int = 64
    time_scale: float = 1.0
    dtype: Any = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch dim"], t: Times, cond: Int[Array, "batch"] | None = None
    ) -> Float[Array, "batch dim"]:
        """Predicts epsilon, x0 or v, whatever it is trained for; see the module's docstring.

        Raises:
          ValueError: if `t` or `cond` does not fit.
        """
        embedding = TimeAndClass(
            self.embedding_dim, self.embedding_dim, self.num_classes, self.time_scale, self.dtype, name="embedding"
        )(x, t, cond)
        h = nn.Dense(self.width, dtype=self.dtype, name="in")(x)
        for i in range(self.blocks):
            h = MLPBlock(self.width, self.dtype, name=f"block_{i}")(h, embedding)
        scale, shift = _modulation(self, embedding, 2, self.width, "modulate_out")
        h = nn.silu((1 + scale) * _layer_norm(self.dtype, "norm_out")(h) + shift)
        h = nn.Dense(x.shape[-1], kernel_init=nn.initializers.zeros, dtype=self.dtype, name="out")(h)
        return h.astype(_output_dtype(h))


class TimeAndClass(nn.Module):
    """Embeds times and class labels into one vector per example: a perceptron of sinusoids plus a row per class."""

    features: int
    sinusoids: int
    num_classes: int | None
    time_scale: float
    dtype: Any
    use_time: bool = True

    @nn.compact
    def __call__(self, x, t, labels):
        batch = x.shape[0]
        embedding = jnp.zeros((batch, self.features), self.dtype or x.dtype)
        if self.use_time:
            # Never in bfloat16, which cannot tell timestep 999 from 1000.
            times = self.time_scale * _per_example(t, batch).astype(jnp.promote_types(x.dtype, jnp.float32))
            h = timestep_embedding(times, self.sinusoids)
            h = nn.silu(nn.Dense(self.features, dtype=self.dtype, name="time_in")(h))
            embedding = nn.Dense(self.features, dtype=self.dtype, name="time_out")(h)
        if self.num_classes is not None:
            labels = jnp.full(batch, self.num_classes) if labels is None else labels
            if labels.shape != (batch,) or not jnp.issubdtype(labels.dtype, jnp.integer):
                raise ValueError(f"cond must be {batch} integer labels, got {labels.shape} of {labels.dtype}")
            embedding = embedding + nn.Embed(self.num_classes + 1, self.features, dtype=self.dtype, name="classes")(labels)
        elif labels is not None:
            raise ValueError(f"cond must be None for a network without num_classes or cond_dim, got {labels.shape}")
        return nn.silu(embedding)


class ResBlock(nn.Module):
    """Two 3x3 convolutions, modulated between them by the embedding, around a shortcut."""

    width: int
    groups: int
    dtype: Any

    @nn.compact
    def __call__(self, x, embedding):
        conv = lambda name, **kw: nn.Conv(self.width, (3, 3), padding=1, dtype=self.dtype, name=name, **kw)
        h = conv("conv_0")(nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype, name="norm_0")(x)))
        scale, shift = _modulation(self, embedding, 2, self.width, "modulate")
        h = nn.GroupNorm(self.groups, dtype=self.dtype, name="norm_1")(h)
        h = nn.silu((1 + scale[:, None, None]) * h + shift[:, None, None])
        h = conv("conv_1", kernel_init=nn.initializers.zeros)(h)
        if x.shape[-1] != self.width:
            x = nn.Dense(self.width, dtype=self.dtype, name="shortcut")(x)
        return x + h


class DiTBlock(nn.Module):
    """Self-attention and a perceptron, each behind adaptive layer normalisation with a gate that starts closed."""

    heads: int
    widening: int
    dtype: Any

    @nn.compact
    def __call__(self, h, embedding, places):
        hidden = h.shape[-1]
        modulation = [m[:, None] for m in _modulation(self, embedding, 6, hidden, "modulate")]
        scale, shift, gate = modulation[:3]
        # With nothing to adapt to, a branch that starts closed only learns late: then this is a plain transformer's block.
        opened = 1 if embedding is None else 0
        branch = (1 + scale) * _layer_norm(self.dtype, "norm_0")(h) + shift
        h = h + (opened + gate) * Attention(self.heads, dtype=self.dtype, name="attention")(branch, places=places)
        scale, shift, gate = modulation[3:]
        branch = (1 + scale) * _layer_norm(self.dtype, "norm_1")(h) + shift
        branch = nn.gelu(nn.Dense(self.widening * hidden, dtype=self.dtype, name="widen")(branch))
        return h + (opened + gate) * nn.Dense(hidden, dtype=self.dtype, name="narrow")(branch)


class MLPBlock(nn.Module):
    """A modulated two-layer residual perceptron."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, h, embedding):
        scale, shift = _modulation(self, embedding, 2, self.width, "modulate")
        branch = nn.silu((1 + scale) * _layer_norm(self.dtype, "norm")(h) + shift)
        branch = nn.silu(nn.Dense(self.width, dtype=self.dtype, name="widen")(branch))
        return h + nn.Dense(self.width, dtype=self.dtype, name="narrow")(branch)


class Attention(nn.Module):
    """Multi-head attention of `x` to itself or to `context`, with rotary positions if `places` (tokens, axes) are given."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, context=None, *, places=None):
        width = x.shape[-1]
        if width % self.heads:
            raise ValueError(f"heads must divide the width {width}, got {self.heads}")
        project = lambda parts, name: nn.DenseGeneral((parts, self.heads, width // self.heads), dtype=self.dtype, name=name)
        if context is None:
            query, key, value = jnp.moveaxis(project(3, "qkv")(x), 2, 0)
        else:
            (query,) = jnp.moveaxis(project(1, "query")(x), 2, 0)
            key, value = jnp.moveaxis(project(2, "key_value")(context), 2, 0)
        if places is not None:
            query, key = _rotate(query, places), _rotate(key, places)
        # Not jax.nn.dot_product_attention, whose softmax is in float32 even between float64 arrays.
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(width // self.heads)
        weights = jax.nn.softmax(scores.astype(jnp.promote_types(scores.dtype, jnp.float32))).astype(value.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, name="merge")(mixed)


def _rotate(
    x: Float[Array, "batch tokens heads dim"], places: Int[Array, "tokens axes"]
) -> Float[Array, "batch tokens heads dim"]:
    """Rotary embedding: turns pairs of features by angles proportional to the token's place along each axis."""
    dim, axes = x.shape[-1], places.shape[-1]
    if dim % (2 * axes):
        raise ValueError(f"hidden / heads must be divisible by {2 * axes} for rotary positions, got {dim}")
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = 10_000.0 ** (-jnp.arange(0, 1, 2 * axes / dim, dtype=wide))
    angles = (places[:, :, None] * frequencies).reshape(places.shape[0], 1, dim // 2)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1).astype(x.dtype)


def _modulation(module, embedding, parts, width, name):
    """Scales, shifts and gates from the embedding, all zero at first, as rows per example; parameters if it is None."""
    if embedding is None:
        table = module.param(name, nn.initializers.zeros, (parts, 1, width))
        return list(table if module.dtype is None else table.astype(module.dtype))
    dense = nn.Dense(parts * width, kernel_init=nn.initializers.zeros, dtype=module.dtype, name=name)
    return jnp.split(dense(embedding), parts, axis=-1)


def _layer_norm(dtype, name):
    return nn.LayerNorm(use_scale=False, use_bias=False, dtype=dtype, name=name)


def _double(x, shape):
    """Nearest-neighbour upsampling by two, cropped to the height and width of `shape`."""
    doubled = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
    return doubled[:, : shape[1], : shape[2]]


def _to_patches(x, patch):
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, patch * patch * channels)


def _from_patches(patches, shape, patch):
    batch, height, width, channels = shape
    x = patches.reshape(batch, height // patch, width // patch, patch, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(shape)


def _windows(h, width):
    """The features of the `width` tokens around each, side by side; zeros beyond the ends."""
    reach = width // 2
    padded = jnp.pad(h, ((0, 0), (reach, reach), (0, 0)))
    return jnp.concatenate([padded[:, i : i + h.shape[1]] for i in range(width)], axis=-1)


def _per_example(t, batch):
    t = jnp.asarray(t)
    if t.shape not in ((), (batch,)):
        raise ValueError(f"t must be a scalar or one time for each of the {batch} examples, got {t.shape}")
    return jnp.broadcast_to(t, (batch,))


def _output_dtype(h):
    return jnp.promote_types(h.dtype, jnp.float32)
