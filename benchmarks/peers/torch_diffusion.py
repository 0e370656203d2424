"""The PyTorch side of bench_diffusion.py: FK steering as a plain loop, `diffusers` schedulers, `particles` resampling."""

import json
import sys
import time

import numpy as np
import torch
from diffusers import DDIMScheduler
from particles import resampling
from torch.nn import functional

torch.set_grad_enabled(False)


class Tasks:
    """Each method answers one request."""

    def load(self, file, threads):
        torch.set_num_threads(threads)
        self.arrays = {k: torch.from_numpy(v) for k, v in np.load(file).items()}
        return {"torch": torch.__version__, "threads": torch.get_num_threads()}

    # FK steering ---------------------------------------------------------------------------------------------------------

    def mlp(self, x, t):
        a = self.arrays
        scaled = torch.full((x.shape[0], 1), float(t) / 1000)
        hidden = functional.silu(torch.cat([x, scaled], dim=1) @ a["mlp/w1"] + a["mlp/b1"])
        return hidden @ a["mlp/w2"] + a["mlp/b2"]

    def fk(self, particles, steps, every, lam):
        """DDIM with eta = 1, the running maximum as potential, multinomial resampling: the usual script."""
        scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False)
        scheduler.set_timesteps(steps)
        target = self.arrays["target"]
        start = time.perf_counter()
        x = torch.randn(particles, target.shape[0])
        best, product = torch.zeros(particles), torch.ones(particles)
        for i, t in enumerate(scheduler.timesteps):
            out = scheduler.step(self.mlp(x, t), t, x, eta=1.0)
            x = out.prev_sample
            last = i == steps - 1
            if i % every == 0 or last:
                reward = -((out.pred_original_sample - target) ** 2).mean(dim=1)
                best = torch.maximum(best, reward)
                weight = torch.exp(lam * best)
                weight = weight / product if last else weight
                weight = torch.nan_to_num(weight).clamp(0, 1e10)
                parents = torch.multinomial(weight, particles, replacement=True)
                x, best, product = x[parents], best[parents], (product * weight)[parents]
        return {"seconds": time.perf_counter() - start}

    # The library's UNet2D, weight for weight ----------------------------------------------------------------------------

    def dense(self, name, x):
        return x @ self.arrays[f"unet/{name}/kernel"] + self.arrays[f"unet/{name}/bias"]

    def conv(self, name, x, stride=1):
        # Stored as height, width, in, out.
        kernel = self.arrays[f"unet/{name}/kernel"].permute(3, 2, 0, 1)
        return functional.conv2d(x, kernel, self.arrays[f"unet/{name}/bias"], stride=stride, padding=1)

    def norm(self, name, x):
        scale, bias = self.arrays[f"unet/{name}/scale"], self.arrays[f"unet/{name}/bias"]
        return functional.group_norm(x, 8, scale, bias, eps=1e-6)

    def block(self, name, x, embedding):
        h = self.conv(f"{name}/conv_0", functional.silu(self.norm(f"{name}/norm_0", x)))
        scale, shift = self.dense(f"{name}/modulate", embedding)[:, :, None, None].chunk(2, dim=1)
        h = functional.silu((1 + scale) * self.norm(f"{name}/norm_1", h) + shift)
        h = self.conv(f"{name}/conv_1", h)
        if f"unet/{name}/shortcut/kernel" in self.arrays:
            x = self.dense(f"{name}/shortcut", x.movedim(1, -1)).movedim(-1, 1)
        return x + h

    def unet(self, x, t):
        """Two levels of two blocks, no attention; NCHW."""
        width = self.arrays["unet/embedding/time_in/kernel"].shape[0]
        frequencies = torch.exp(-np.log(10_000) * torch.arange(width // 2) / (width // 2))
        angles = t[:, None].float() * frequencies
        embedding = functional.silu(self.dense("embedding/time_in", torch.cat([angles.sin(), angles.cos()], dim=1)))
        embedding = functional.silu(self.dense("embedding/time_out", embedding))
        h = self.conv("conv_in", x)
        skips = [h]
        for level in (0, 1):
            for i in range(2):
                h = self.block(f"down_{level}_block_{i}", h, embedding)
                skips.append(h)
            if level == 0:
                h = self.conv("down_0_halve", h, stride=2)
                skips.append(h)
        for i in range(2):
            h = self.block(f"middle_block_{i}", h, embedding)
        for level in (1, 0):
            for i in range(3):
                h = self.block(f"up_{level}_block_{i}", torch.cat([h, skips.pop()], dim=1), embedding)
            if level == 1:
                h = self.conv("up_1_double", functional.interpolate(h, scale_factor=2, mode="nearest"))
        return self.conv("conv_out", functional.silu(self.norm("norm_out", h)))

    # Samplers ------------------------------------------------------------------------------------------------------------

    def unet_output(self, file):
        np.savez(file, out=self.unet(self.arrays["unet_x"], self.arrays["unet_t"]).numpy())
        return {}

    def ddim_unet(self, steps):
        return {"seconds": self._ddim(self.unet, self.arrays["unet_x"], steps)}

    def ddim_identity(self, steps):
        return {"seconds": self._ddim(lambda x, t: x, torch.randn(1, 4, 64, 64), steps)}

    def _ddim(self, network, x, steps):
        scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False)
        scheduler.set_timesteps(steps)
        start = time.perf_counter()
        for t in scheduler.timesteps:
            x = scheduler.step(network(x, t.expand(x.shape[0])), t, x).prev_sample
        return time.perf_counter() - start

    # Resampling ----------------------------------------------------------------------------------------------------------

    def resample(self, scheme, particles, repeats):
        weights = np.random.default_rng(0).dirichlet(np.ones(particles))
        start = time.perf_counter()
        for _ in range(repeats):
            resampling.resampling(scheme, weights)
        return {"seconds": (time.perf_counter() - start) / repeats}


def main():
    tasks = Tasks()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(tasks, request.pop("task"))(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
