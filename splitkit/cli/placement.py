"""What the command line asks of a placement: devices or stages, their memory and links, a schedule; and the policy."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from splitkit.cli import devicelist
from splitkit.cli.devicelist import DeviceList
from splitkit.errors import UsageError
from splitkit.units import read_percent, read_size, size

if TYPE_CHECKING:
    from splitkit.pipeline.stageprices import Optimizer
    from splitkit.plans.policy import Policy

MOST_BYTES = 2**70
"""What ``--memory`` may say."""
OPTIONS = ("devices", "schedule", "microbatches", "links", "replicas", "optimizer", "objective", "trace")
"""Options that only a placement has; ``--memory`` has another meaning with ``--what fwd-bwd``."""


def wanted(args: Namespace) -> bool:
    """Whether the command line asks for more than a policy."""
    return args.memory is not None or any(getattr(args, name) is not None for name in OPTIONS)


def refuse_with(args: Namespace, what: str, remedy: str, names: tuple[str, ...] = OPTIONS) -> None:
    """Refuse what does not go with ``what``.

    Raises:
        UsageError: SK601.
    """
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError("SK601", f"--{name} does not go with {what}", remedy)


def check(args: Namespace) -> None:
    """Refuse options that do not go together; without torch.

    Raises:
        UsageError: SK601.
    """
    if args.policy is not None:
        remedy = "Give it to the policy: --policy \"Stages(4, schedule='1f1b')\"; or leave --policy out."
        refuse_with(args, "--policy", remedy, (*OPTIONS, "memory"))
    if args.devices is not None and args.stages is not None:
        raise UsageError(
            "SK601",
            "--devices says how many stages there are, and so does --stages",
            "Leave --stages out; or give --stages with --costs roofline:h200 --links nvlink4 in place of --devices.",
        )
    if args.devices is None and args.stages is None:
        name = next(name for name in (*OPTIONS, "memory") if getattr(args, name) is not None)
        remedy = "Add --devices 4xh200 or --stages 4."
        if name == "memory":
            remedy = f"{remedy} With --what fwd-bwd it is the peak of a training step."
        raise UsageError("SK601", f"--{name} needs devices or stages", remedy)
    for name in ("microbatches", "trace"):
        if getattr(args, name) is not None and args.schedule is None:
            raise UsageError("SK601", f"--{name} goes with --schedule", "Add --schedule 1f1b.")
    if args.objective is not None and args.devices is None:
        raise UsageError("SK601", "--objective goes with --devices", "Add --devices 4xh200 in place of --stages.")
    if args.schedule is not None and args.objective == "latency":
        raise UsageError("SK601", "--schedule is for throughput", "Leave out --schedule or --objective latency.")
    if args.schedule is not None and args.optimizer == "none":
        raise UsageError("SK601", "--schedule is of training, --optimizer none of inference", "Leave one of them out.")
    if args.devices is not None:
        devicelist.check(args.devices)
    check_memory(args)


def check_memory(args: Namespace, least: bool = True) -> None:
    """Refuse a ``--memory`` that cannot be read; without torch.

    Args:
        args: with ``memory`` and ``devices``.
        least: whether the word ``least`` is allowed.

    Raises:
        UsageError: SK601.
    """
    if args.memory is None or (least and args.memory == "least"):
        return
    if "%" in args.memory:
        if not read_percent(args.memory):
            raise UsageError("SK601", f"--memory {args.memory:.60} is no share", "Write a share above 0%, such as 80%.")
        if args.devices is None:
            remedy = "Name the devices whose memory it is a share of, such as --devices 4xh200; or write bytes: 80GiB."
            raise UsageError("SK601", f"--memory {args.memory} is a share, and no device is named", remedy)
    elif (found := read_size(args.memory)) is None or found > MOST_BYTES:
        raise UsageError(
            "SK601", f"--memory {args.memory:.60} is no size", "Write bytes, 80GiB, or 80% with --devices."
        )


def memory_of(args: Namespace, devices: DeviceList | None) -> int | str | tuple[int, ...] | None:
    """A checked ``--memory``: bytes of every device, bytes of each where a share of unlike devices is asked for,
    ``"least"``, or ``None`` where nothing is said.
    """
    if args.memory is None or args.memory == "least":
        memory: str | None = args.memory
        return memory
    share = read_percent(args.memory)
    if share is None:
        return read_size(args.memory)
    assert devices is not None
    each = tuple(int(share * device.memory) for device in devices.devices)
    return each[0] if devices.alike else each


@dataclass(frozen=True)
class Placement:
    """What is asked for.

    Attributes:
        devices: each of them; ``None`` where only a number of stages is given.
        stages: how many; ``None`` where devices are given that differ, or one sample is to be fast.
        schedule: of the pipeline.
        microbatches: of a step; ``None``: as the policy has it.
        memory: bytes of each device, one number if it is the same for all, or ``"least"``, if the command line says.
        links: the name of a preset.
        links_from: why these.
        optimizer: whose state is held; ``None`` for inference.
        objective: ``"throughput"`` or ``"latency"``.
        replicas: on how many devices a stage may stand; ``stages`` then says how many devices there are.
    """

    devices: DeviceList | None
    stages: int | None
    schedule: str | None
    microbatches: int | None
    memory: int | str | tuple[int, ...] | None
    links: str | None
    links_from: str
    optimizer: Optimizer
    objective: str
    replicas: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, args: Namespace) -> Placement:
        """What checked arguments ask for; imports torch.

        Raises:
            UsageError: SK601 for devices that differ with options that need them alike.
            SplitError: for devices, links and schedules that are not known.
        """
        devices = None if args.devices is None else devicelist.read(args.devices)
        if devices is not None and not devices.alike:
            _require_alike(args, devices)
        objective = args.objective or "throughput"
        stages = args.stages
        if devices is not None and devices.alike and objective == "throughput":
            stages = len(devices.devices) * _stages_a_rank(args.schedule)
        if stages is None and args.memory == "least":
            remedy = "Name one kind of device, 4xh200, or give --stages 4; leave --objective latency out."
            raise UsageError("SK601", "--memory least is for stages on devices that are alike", remedy)
        if stages is None and args.replicas is not None:
            remedy = "Name one kind of device, 8xh200, or give --stages 8; leave --objective latency out."
            raise UsageError("SK601", "--replicas is for stages on devices that are alike", remedy)
        links, why = links_of(args.links, devices)
        optimizer = args.optimizer or ("none" if args.schedule is None else "adam")
        return cls(
            devices=devices,
            stages=stages,
            schedule=args.schedule,
            microbatches=_microbatches(args, stages),
            memory=memory_of(args, devices),
            links=links,
            links_from=why,
            optimizer=None if optimizer == "none" else cast("Optimizer", optimizer),
            objective=objective,
            replicas=args.replicas or (1,),
        )

    def policy(self) -> Policy:
        """`Stages` for devices that are alike, else `Devices`."""
        from splitkit.policies import Devices, Stages

        if self.stages is not None:
            memory = self.memory
            if memory is None and self.devices is not None:
                memory = self.devices.devices[0].memory
            asked = self.schedule, self.microbatches, memory, self.links, self.optimizer
            return Stages(self.stages, *asked, replicas=self.replicas)
        assert self.devices is not None
        given = list(self.devices.devices)
        return Devices(given, self.memory, self.links, self.objective, optimizer=self.optimizer)

    def limit(self, rank: int) -> int | None:
        """Bytes that a rank has, ``None`` for no limit."""
        if isinstance(self.memory, int) or self.devices is None:
            return self.memory if isinstance(self.memory, int) else None
        device = self.devices.devices[rank]
        host = device.name == "cpu" and not self.devices.alike
        limit = self.memory[rank] if isinstance(self.memory, tuple) else device.memory
        return None if host else limit

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "devices": None if self.devices is None else [device.name for device in self.devices.devices],
            "stages": self.stages,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "memory": list(self.memory) if isinstance(self.memory, tuple) else self.memory,
            "links": self.links,
            "optimizer": self.optimizer,
            "objective": self.objective,
            "replicas": list(self.replicas),
        }

    def facts(self) -> dict[str, str]:
        """For people."""
        rows = {} if self.devices is None else {"devices": str(self.devices)}
        if self.devices is None or self.devices.alike or self.memory is not None:
            limit = self.limit(0)
            rows["memory"] = "no limit" if limit is None else f"{size(limit)} a device"
        if isinstance(self.memory, tuple):
            rows["memory"] = ", ".join(map(size, self.memory))
        if self.memory == "least":
            rows["memory"] = "as little as can be"
        rows["links"] = f"{self.links or 'none'}{self.links_from}"
        rows["purpose"] = f"training with {self.optimizer}" if self.optimizer else "inference"
        return rows


def links_of(given: str | None, devices: DeviceList | None) -> tuple[str | None, str]:
    """The name of the links, ``None`` for none, and why these."""
    if given is not None:
        return None if given == "none" else given, ""
    if devices is None:
        return None, ": values cross for nothing (--links nvlink4)"
    if devices.links is not None:
        return devices.links, " of the file"
    return devices.usual_links, f", usual for {devices.kinds} (others with --links)"


def _microbatches(args: Namespace, stages: int | None) -> int | None:
    """Of a step: with replicas two for each device, whatever the number of stages."""
    if args.microbatches is None and args.replicas is not None and args.schedule is not None and stages is not None:
        return 2 * stages
    found: int | None = args.microbatches
    return found


def _require_alike(args: Namespace, devices: DeviceList) -> None:
    if args.schedule is not None:
        raise UsageError(
            "SK601",
            f"--schedule {args.schedule} needs devices that are alike, and these are {devices}",
            "Leave --schedule out: devices that differ are planned for throughput or latency. "
            "Or name one kind, 4xh200.",
        )
    for name in ("costs", "training"):
        if getattr(args, name) is not None:
            raise UsageError(
                "SK601",
                f"--{name} gives each node one price, and these devices differ: {devices}",
                f"Leave --{name} out: each has the prices of its roofline; --optimizer adam adds the backward.",
            )


def _stages_a_rank(schedule: str | None) -> int:
    """How many stages torch's schedule puts on each rank."""
    if schedule is None:
        return 1
    from splitkit.pipeline.torch_orders import pipeline_order

    return 2 // len(pipeline_order(schedule, 2, 2).ranks)
