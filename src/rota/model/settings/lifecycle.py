"""Settings of the job lifecycle: dispatch, recovery, routing, policy, workflows."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from rota.model.settings.kinds import Boolean, Choice, Duration, Float, Integer, Seconds, Secret, String
from rota.model.settings.section import Section

FailMode = Literal["closed", "open"]
CounterMode = Literal["ledger", "scan"]


class SchedulerSettings(Section, frozen=True):
    """Dispatch: delays and retries."""

    store_op_timeout: Annotated[float, Duration("Timeout of a Redis operation.")] = 2.0
    job_lock_ttl: Annotated[
        float, Duration("Accepted without effect: jobs have no locks, PostgreSQL rows decide.", least=1.0)
    ] = 60.0
    max_renewal_failures: Annotated[
        int, Integer("Accepted without effect: a lease is lost when it expires.", least=1)
    ] = 3
    max_scheduling_retries: Annotated[int, Integer("Failed dispatches after which a job is FAILED.", least=1)] = 50
    max_worker_losses: Annotated[
        int, Integer("Lost workers per frame before it is FAILED, unless its layer sets a limit.", most=1000)
    ] = 10
    retry_delay_busy: Annotated[float, Duration("Accepted without effect: jobs have no locks to wait for.")] = 0.5
    retry_delay_store: Annotated[
        float, Duration("Accepted without effect: work resumes as soon as PostgreSQL is available.")
    ] = 1.0
    retry_delay_publish: Annotated[
        float, Duration("Accepted without effect: a failed assignment backs off like any failed dispatch.")
    ] = 2.0
    retry_delay_no_workers: Annotated[
        float, Duration("Accepted without effect: new workers trigger a dispatch immediately.")
    ] = 2.0
    safety_throttle_delay: Annotated[float, Duration("Delay when the safety kernel throttles or is unavailable.")] = 5.0
    backoff_base: Annotated[
        float, Duration("Delay after the first failed dispatch; doubles with each further one.")
    ] = 1.0
    backoff_max: Annotated[float, Duration("Longest such delay.")] = 30.0
    backoff_jitter: Annotated[float, Duration("Maximum random addition to such a delay.", least=0.0)] = 0.5


class ReconcilerSettings(Section, frozen=True):
    """Ends jobs that make no progress."""

    dispatch_timeout: Annotated[
        float, Duration("Accepted without effect: frames that their worker does not have are requeued in seconds.")
    ] = 300.0
    running_timeout: Annotated[
        float,
        Duration("Longest time on a worker of a frame without its own timeout; servers end it a minute later."),
    ] = 9000.0
    poll_interval: Annotated[
        float, Duration("Delay before the end of a job is retried after it failed; others are processed continuously.")
    ] = 30.0
    max_iterations_per_tick: Annotated[int, Integer("Maximum number of batches per pass.", least=1)] = 100
    batch_size: Annotated[int, Integer("Jobs per batch.", least=1, most=10_000)] = 200
    max_retries_per_job: Annotated[int, Integer("Retries to end one job before it backs off.", most=1000)] = 3


class ReplayerSettings(Section, frozen=True):
    """Resumes jobs that no server is processing."""

    pending_age: Annotated[float, Duration("Age at which a pending or approved job is resumed.")] = 120.0
    poll_interval: Annotated[float, Duration("Interval between passes.")] = 30.0


class RoutingSettings(Section, frozen=True):
    """Pools of topics, and when a worker counts as overloaded by load that Rota did not book."""

    pools_file: Annotated[
        str | None,
        String(
            "File with topics and pools, reloaded when it changes.",
            env="POOL_CONFIG_PATH",
            pattern=r"[^\x00-\x1f]+",
            described="a path",
        ),
    ] = None
    reload_interval: Annotated[float, Duration("Interval between checks for changed pools and topics.")] = 30.0
    overload_utilization: Annotated[float, Float("Share of slots used by frames without a booking.")] = 0.9
    overload_cpu_load: Annotated[float, Float("CPU load in percent, minus the booked share of cores.", most=100.0)] = (
        90.0
    )
    overload_gpu_utilization: Annotated[
        float, Float("GPU use in percent, minus the booked share of GPUs.", most=100.0)
    ] = 90.0
    overload_accounted: Annotated[
        bool, Boolean("Whether these two limits also apply to workers that announce their cores.")
    ] = False


class RegistrySettings(Section, frozen=True):
    """Known workers, and how a new replica learns of them."""

    worker_ttl: Annotated[float, Duration("Time without a heartbeat after which a worker is removed.")] = 30.0
    snapshot_interval: Annotated[float, Duration("Interval between snapshots of the workers.")] = 5.0
    snapshot_lock_ttl: Annotated[float, Duration("Lease of the snapshot writer.")] = 10.0
    snapshot_read_timeout: Annotated[float, Duration("Longest wait for the snapshot at start.")] = 5.0


class CommandLimitsSettings(Section, frozen=True):
    """Limits of each process of a command; 0: no limit. A layer may set lower ones."""

    cpu_seconds: Annotated[int, Seconds("CPU time.")] = 0
    address_mib: Annotated[int, Integer("Mebibytes of address space.")] = 0
    open_files: Annotated[int, Integer("Open files and sockets.")] = 0
    file_mib: Annotated[int, Integer("Mebibytes of any file that it writes.")] = 0


class WorkerSettings(Section, frozen=True):
    """Worker processes."""

    heartbeat_interval: Annotated[float, Duration("Interval between heartbeats of workers that register later.")] = 2.0
    pool: Annotated[
        str, String("Pool of a worker without --pool.", pattern=r"[\w.-]{1,64}", described="a pool's name")
    ] = "local"
    slots: Annotated[
        int, Integer("Maximum number of concurrent frames, whatever their resources.", least=1, most=1_000_000)
    ] = 1000
    processes: Annotated[
        int, Integer("Maximum number of processes for sync tasks; 0: one per core of the machine.", most=10_000)
    ] = 0
    drain_timeout: Annotated[float, Duration("Longest wait at stop for frames to finish.")] = 60.0
    output_max: Annotated[
        int, Integer("Bytes stored per output stream of a frame: half from its start, half from its end.")
    ] = 10 * 1024 * 1024
    work_dir: Annotated[
        str | None,
        String(
            "Directory in which each command gets its own; empty: a temporary one.",
            pattern=r"[^\x00-\x1f]+",
            described="a path",
        ),
    ] = None
    keep_dirs: Annotated[bool, Boolean("Keep the directories of commands that have ended.")] = False
    metrics_host: Annotated[
        str,
        String(
            "Address of a worker's /health, /ready and /metrics, without authentication.",
            pattern=r"[\w.:%-]{1,253}",
            described="a host name or address",
        ),
    ] = "127.0.0.1"
    metrics_port: Annotated[int, Integer("Port of these; 0: disabled.", most=65535)] = 0
    limits: CommandLimitsSettings = CommandLimitsSettings()


class SafetySettings(Section, frozen=True):
    """Calls to the safety kernel, and their circuit breaker."""

    timeout: Annotated[float, Duration("Timeout of a policy decision, which is valid for 30 s.", most=20.0)] = 2.0
    circuit_fail_budget: Annotated[int, Integer("Consecutive failures that open the breaker.", least=1)] = 3
    circuit_open_for: Annotated[float, Duration("Time without calls before recovery is probed.")] = 30.0
    circuit_half_open_max: Annotated[int, Integer("Maximum number of probes.", least=1)] = 3
    circuit_close_after: Annotated[int, Integer("Successful probes that close the breaker.", least=1)] = 2


class SafetyKernelSettings(Section, frozen=True):
    """Address and transport security of the safety kernel, and where `rota kernel` listens."""

    addr: Annotated[
        str | None,
        String(
            "Host and port of its gRPC service; without it every server evaluates the policy file.",
            env="SAFETY_KERNEL_ADDR",
            pattern=r"(?:[\w.-]{1,253}|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}",
            described="a host and port such as localhost:50051",
        ),
    ] = None
    tls_ca: Annotated[
        str | None,
        String(
            "File with its certificate authority; default: those of this machine.",
            env="SAFETY_KERNEL_TLS_CA",
            pattern=r"[^\x00-\x1f]+",
            described="a path",
        ),
    ] = None
    tls_required: Annotated[bool, Boolean("Refuse a connection without TLS.", env="SAFETY_KERNEL_TLS_REQUIRED")] = False
    insecure: Annotated[
        bool, Boolean("Allow a connection without TLS to another machine.", env="SAFETY_KERNEL_INSECURE")
    ] = False
    shared_secret: Annotated[
        str | None,
        Secret(
            "Secret that servers send to the kernel; required if it is reachable from other machines.",
            pattern=r"[\x21-\x7e]{16,512}",
            described="16 to 512 printable characters without spaces",
        ),
    ] = None
    host: Annotated[
        str,
        String(
            "Address that `rota kernel` listens on.",
            pattern=r"[\w.:%-]{1,253}",
            described="a host name or address",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Integer("Port that `rota kernel` listens on; 0: a free one.", most=65535)] = 50051
    health_port: Annotated[
        int, Integer("Port of its health, readiness and metrics on listen.host; 0: a free one.", most=65535)
    ] = 7684
    tls_cert: Annotated[
        str | None,
        String(
            "File with the certificate chain of `rota kernel`, PEM.",
            env="SAFETY_KERNEL_TLS_CERT",
            pattern=r"[^\x00-\x1f]+",
            described="a path",
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        String(
            "File with its private key, PEM.",
            env="SAFETY_KERNEL_TLS_KEY",
            pattern=r"[^\x00-\x1f]+",
            described="a path",
        ),
    ] = None


class PolicySettings(Section, frozen=True):
    """The policy file, read by `rota kernel`, or by every server if no kernel is configured."""

    file: Annotated[
        str | None,
        String(
            "The policy file; without it and without a kernel every job may run.",
            env="SAFETY_POLICY_PATH",
            pattern=r"[^\x00-\x1f]+",
            described="a path",
        ),
    ] = None
    reload_interval: Annotated[
        float, Duration("Interval between checks of the file.", env="SAFETY_POLICY_RELOAD_INTERVAL")
    ] = 30.0
    public_key_file: Annotated[
        str | None,
        String(
            "File with the Ed25519 public key that verifies signatures, PEM.",
            env="SAFETY_POLICY_PUBLIC_KEY",
            pattern=r"[^\x00-\x1f]+",
            described="a path",
        ),
    ] = None
    signature_file: Annotated[
        str | None,
        String(
            "File with the signature of the policy, raw or base64; default: the policy file with .sig appended.",
            env="SAFETY_POLICY_SIGNATURE_PATH",
            pattern=r"[^\x00-\x1f]+",
            described="a path",
        ),
    ] = None
    signature_required: Annotated[
        bool, Boolean("Refuse a policy without a signature.", env="SAFETY_POLICY_SIGNATURE_REQUIRED")
    ] = False


class InputPolicySettings(Section, frozen=True):
    """Policy for running jobs."""

    fail_mode: Annotated[
        FailMode | None,
        Choice(
            "Without a decision a job waits (closed) or runs (open); default: as in the policy file, else closed.",
            options=get_args(FailMode),
            env="POLICY_CHECK_FAIL_MODE",
        ),
    ] = None


class OutputPolicySettings(Section, frozen=True):
    """Policy for the outputs of jobs."""

    enabled: Annotated[bool, Boolean("Whether outputs are checked.", env="OUTPUT_POLICY_ENABLED")] = False
    fail_mode: Annotated[
        FailMode, Choice("Without a decision an output is held (closed) or passes (open).", options=get_args(FailMode))
    ] = "open"
    content_timeout: Annotated[float, Duration("Timeout of the scan of one output's content.")] = 30.0


class SagaSettings(Section, frozen=True):
    """Rollback of workflows."""

    lock_ttl: Annotated[float, Duration("Lease of a rollback.")] = 120.0
    rollback_timeout: Annotated[float, Duration("Time limit of one pass of a rollback.")] = 30.0


class DelayTimersSettings(Section, frozen=True):
    """Durable timers of workflows."""

    poll_interval: Annotated[float, Duration("Interval between checks for due timers.")] = 5.0
    lock_ttl: Annotated[float, Duration("Lease of the poller.")] = 10.0
    cleanup_interval: Annotated[float, Duration("Interval between removals of index entries without a timer.")] = 300.0


class WorkflowSettings(Section, frozen=True):
    """Workflow runs."""

    run_lock_ttl: Annotated[float, Duration("Lease of a run without renewal.", least=1.0)] = 30.0
    poll_interval: Annotated[
        float, Duration("Interval between passes of the reconciler; its lease is twice as long.")
    ] = 30.0
    delay: DelayTimersSettings = DelayTimersSettings()


class QueueSettings(Section, frozen=True):
    """The queue of frames."""

    counter_mode: Annotated[CounterMode, Choice("How exact counts are maintained.", options=get_args(CounterMode))] = (
        "ledger"
    )


class RetentionSettings(Section, frozen=True):
    """How long ended work is kept."""

    failed_frames: Annotated[float, Duration("Failed frames; they can be retried until then.", least=60.0)] = (
        72 * 3600.0
    )
    finished_jobs: Annotated[float, Duration("Finished jobs, layers, logs and events.", least=60.0)] = 30 * 86400.0
    idempotency_keys: Annotated[
        float, Duration("Idempotency keys of ended jobs; afterwards a key may be reused.", least=60.0)
    ] = 90 * 86400.0
