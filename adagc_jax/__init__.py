"""Adaptive, local and observable gradient clipping for optax.

``optax.chain(adagc(), optax.adamw(schedule))`` clips every tensor against its own
recent gradient norm, and shows what it did. See the README for a tour.
"""

from adagc_jax import kernels as kernels, schedules as schedules
from adagc_jax.accumulate import fresh_windows as fresh_windows
from adagc_jax.agc_zclip import agc as agc, zclip as zclip
from adagc_jax.clip import clip_by_rule as clip_by_rule
from adagc_jax.derived import (
    stacked_from_metadata as stacked_from_metadata,
    stacked_scan as stacked_scan,
)
from adagc_jax.describe import describe as describe
from adagc_jax.ema_ratio import EmaRatio as EmaRatio
from adagc_jax.explain import KernelTable as KernelTable, explain as explain
from adagc_jax.fixed import (
    clip_by_value as clip_by_value,
    global_gc as global_gc,
    tensor_gc as tensor_gc,
)
from adagc_jax.groups import (
    Groups as Groups,
    per_shard as per_shard,
    per_tensor as per_tensor,
    stacked as stacked,
    units as units,
    whole_tree as whole_tree,
)
from adagc_jax.guard import (
    SKIP_STEP as SKIP_STEP,
    ClipEvidence as ClipEvidence,
    GuardState as GuardState,
    guard as guard,
    guard_metrics as guard_metrics,
)
from adagc_jax.metrics import clip_metrics as clip_metrics, group_names as group_names
from adagc_jax.report import ClipReport as ClipReport, clip_report as clip_report
from adagc_jax.restore import restore_state as restore_state
from adagc_jax.rollback import Rollback as Rollback
from adagc_jax.rules import (
    FixedNorm as FixedNorm,
    Observation as Observation,
    ParamRatio as ParamRatio,
    Rule as Rule,
)
from adagc_jax.specs import state_specs as state_specs
from adagc_jax.spikes import (
    SpikeRule as SpikeRule,
    spike_monitor as spike_monitor,
    spike_score as spike_score,
)
from adagc_jax.stack_warning import StackedTreeWarning as StackedTreeWarning
from adagc_jax.state import ClipMetrics as ClipMetrics, ClipState as ClipState
from adagc_jax.transfer import (
    Transfer as Transfer,
    TransferReport as TransferReport,
    transfer_state as transfer_state,
)
from adagc_jax.transforms import adagc as adagc, robust_gc as robust_gc
from adagc_jax.z_score import ZScore as ZScore

__version__ = "0.1.0"
