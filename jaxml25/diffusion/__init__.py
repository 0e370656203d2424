"""Diffusion models: schedules, samplers, networks, and the methods that steer them.

The vocabulary of the substrate is here at one level; methods and networks are modules of their own:

    from jaxml25 import diffusion
    from jaxml25.diffusion import fk_steering as fk, networks
"""

from jaxml25.diffusion.dpm_solver import dpmpp
from jaxml25.diffusion.guidance import guided, reward_guided
from jaxml25.diffusion.losses import flow_loss, loss
from jaxml25.diffusion.masked import (
    MaskedSchedule,
    masked_loss,
    masked_sample,
    masked_step_probs,
    q_mask,
    subs_log_probs,
)
from jaxml25.diffusion.predictions import to_eps, to_flow, to_score, to_v, to_x0
from jaxml25.diffusion.samplers import ddim, ddpm, euler, euler_ancestral, flow_euler, flow_sde, heun
from jaxml25.diffusion.schedules import (
    Grid,
    Schedule,
    SigmaGrid,
    flow_grid,
    karras_sigmas,
    make_grid,
    make_schedule,
    make_sigma_grid,
    q_sample,
)
from jaxml25.diffusion.trajectories import sample

__all__ = [
    "Grid",
    "MaskedSchedule",
    "Schedule",
    "SigmaGrid",
    "ddim",
    "ddpm",
    "dpmpp",
    "euler",
    "euler_ancestral",
    "flow_euler",
    "flow_grid",
    "flow_loss",
    "flow_sde",
    "guided",
    "heun",
    "karras_sigmas",
    "loss",
    "make_grid",
    "make_schedule",
    "make_sigma_grid",
    "masked_loss",
    "masked_sample",
    "masked_step_probs",
    "q_mask",
    "q_sample",
    "reward_guided",
    "sample",
    "subs_log_probs",
    "to_eps",
    "to_flow",
    "to_score",
    "to_v",
    "to_x0",
]
