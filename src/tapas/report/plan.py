"""A plan as a page: what it is, how fast and why, how weights and work are split, what it is compared with."""

from math import prod

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tapas.plan.plan import Plan
from tapas.plan.simulate import simulate
from tapas.report import units
from tapas.report.frame import ROOMY, FitToWidth, line, page, print_to, table, text_of
from tapas.report.traffic import sent, sent_table
from tapas.report.weights import legend, weights_table
from tapas.report.words import mesh_text

STRATEGIES = {
    "ddp": "batch split, weights whole everywhere",
    "fsdp": "batch split, weights stored in pieces over all axes",
    "hsdp": "batch split, weights stored in pieces over {last} only",
    "megatron": "heads and features over {last}{rest}",
    "megatron-sp": "megatron, and the sequence split between layers",
    "fsdp+tp": "megatron-sp, and weights stored in pieces over all axes",
    "hf": "transformers' own tp_plan over {last}",
}
KINDS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer state ({optimizer})",
    "activations": "activations kept for the backward pass", "gathered": "gathered weights, kept for the backward pass",
    "working": "working memory of an operator", "constants": "buffers and constants",
    "buffers": "largest communication buffer",
}  # fmt: skip


def header(plan: Plan) -> Group:
    devices = prod(plan.mesh["sizes"])
    settings = ", ".join(f"{k}={v}" for k, v in plan.source.get("settings", {}).items())
    inputs = ", ".join(f"{name} {units.shape(shape)}" for name, shape in plan.inputs.items())
    graph, device = plan.graph, plan.cluster["device"]
    lines = [
        line(
            (plan.model, "bold"), f" ({settings})" if settings else "",
            f": {units.count(graph.get('parameters', 0))} parameters",
            f" in {plan.dtype}, " if plan.dtype else ", ",
            "training step" if plan.training else "inference", f" on {inputs}",
            " (it returns no loss)" if not plan.training and plan.source.get("training", 0) is None else "",
            ", compiled" if compiled(plan) else "",
            f", {plan.source['accumulate']} times before the update" if plan.source.get("accumulate", 1) > 1 else "",
        ),
        line(
            f"{devices} × {device['name']} as a mesh of {mesh_text(plan)}",
            f" (cluster {plan.cluster['name']}, {plan.cluster['per_node']} to a node)",
        ),
    ]  # fmt: skip
    if graph.get("unique"):
        operators, unique = graph.get("operators", 0), graph["unique"]
        folds = f", {unique} of them unique: the search saw only those" if unique < operators else ""
        lines.append(line(f"{units.many(operators, 'operator')}{folds}"))
    return Group(*lines)


def verdict(plan: Plan) -> Group:
    s = plan.seconds
    compute, communication = units.seconds(s.get("compute", 0.0)), units.seconds(s.get("communication", 0.0))
    lines = [
        line(
            ("Step time ", "bold"), (units.seconds(plan.cost), "bold green"),
            f" = compute {compute} + communication {communication}",
            f" ({units.seconds(s['hidden'])} more is hidden behind it)" if s.get("hidden") else "",
        ),
        *_simulated(plan),
        *([line("Throughput ", speed)] if (speed := throughput(plan)) else []),
        _proof(plan),
        *_runs(plan),
    ]  # fmt: skip
    if plan.pins:
        lines.append(line("Pins and restrictions given: ", ", ".join(plan.pins)))
    return Group(*lines)


def _simulated(plan: Plan) -> list[Text]:
    """The step with messages one after the other, and blocks hiding those of their neighbours."""
    step = simulate(plan)
    if step is None or not step.exposed:
        return []
    parts, waited = [f"compute {units.seconds(step.compute)}"], step.exposed - step.held
    if waited > LITTLE * step.seconds:
        parts.append(f"waiting {units.seconds(waited)}")
    if step.held > LITTLE * step.seconds:
        parts.append(f"held up by the host {units.seconds(step.held)} ({'compiled' if compiled(plan) else 'eager'})")
    return [line("Simulated, operator by operator: ", units.seconds(step.seconds), " = ", " + ".join(parts))]


def compiled(plan: Plan) -> bool:
    """Whether the program is to run under torch.compile."""
    return plan.source.get("compile", False)


def throughput(plan: Plan) -> str:
    """`64.6k tokens/s, 8.08k a device`, by the simulated step: there small models wait for the host. Names of inputs
    say what they are; "" where they do not."""
    step, times = simulate(plan), plan.source.get("accumulate", 1)
    seconds, devices = step.seconds if step else plan.cost, prod(plan.mesh["sizes"])
    sizes = {"images": plan.inputs.get("pixel_values", [0])[:1], "tokens": plan.inputs.get("input_ids", [0])}
    rates = {what: times * prod(shape) / seconds for what, shape in sizes.items() if seconds}
    return "; ".join(
        f"{units.rate(rate)} {what}/s, {units.rate(rate / devices)} a device" for what, rate in rates.items() if rate
    )


def _proof(plan: Plan) -> Text:
    options = any(pin.startswith("--") for pin in plan.pins)  # others are the values of --pin
    among = f" among those your {'restrictions' if options else 'pins'} leave" if plan.pins else ""
    # plans that need all but a very little of the limit may be none that the search looked at
    among += f" within {units.nbytes(plan.limit)} per device" if plan.limit else ""
    if plan.proof == "optimal":
        return line(("Optimal", "bold green"), f": by this cost model no other plan{among} is faster (proven)")
    gap = (plan.cost - plan.bound) / plan.cost if plan.cost else 0.0
    fact = f": no plan{among} is faster than {units.seconds(plan.bound)}"
    return line((f"Within {gap:.2%} of the best possible", "bold yellow"), fact)


def _runs(plan: Plan) -> list[Text]:
    if not plan.faster:
        return []
    more = f"{plan.cost / plan.faster['cost'] - 1:.2%}"
    runs, instead = (int(plan.faster[key]) for key in ("runs", "instead_of"))
    fact = f", which takes {more} longer than the fastest plan known, of {instead} runs"
    return [line(f"Layers do the same in {units.many(runs, 'run')}", fact)]


BAR = 12  # columns of a bar
LITTLE = 0.001  # of a step


RECOMPUTED = {"none": "", "gather": "gathered weights", "selective": "all but products", "block": "everything"}


def blocks_table(plan: Plan, width: int) -> Table:
    bars, again = width >= ROOMY, any(b.recompute != "none" for b in plan.blocks)

    def share(seconds: float) -> tuple[str, ...]:
        part = seconds / plan.cost if plan.cost else 0.0
        return units.percent(part), *([units.bar(part, BAR)] if bars else [])

    rows = [
        (block_label(plan, b.name), str(b.copies), units.seconds(b.copies * b.compute),
         units.seconds(b.copies * b.communication), units.seconds(b.copies * b.hidden),
         *share(b.copies * (b.compute + b.communication)),
         *([RECOMPUTED.get(b.recompute, b.recompute)] if again else []))
        for b in plan.blocks
        if b.operators or b.compute or b.communication
    ]  # fmt: skip
    if update := plan.seconds.get("update"):
        rows.append(("optimizer update", "", units.seconds(update), "", "", *share(update), *([""] if again else [])))
    columns = ("~block", ">copies", ">compute", ">waited for", ">hidden", ">share")
    columns += ("!",) if bars else ()
    columns += ("computed again",) if again else ()
    return table("Where the time goes (all copies together; hidden: not part of the step)", columns, rows)


def block_label(plan: Plan, name: str) -> str:
    """A block that is no module by itself is named by the first and last module in it."""
    block = next((b for b in plan.blocks if b.name == name), None)
    if block is None or block.paths:
        return name
    modules = list(dict.fromkeys(op.module for op in plan.operators if op.block == name and op.module))
    if len(modules) < 2:
        return name
    first, last = modules[0].split("."), modules[-1].split(".")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return f"{modules[0]} … {'.'.join(last[same:])}"  # what both lie in is said once


def kind_of_memory(plan: Plan, kind: str) -> str:
    if kind == "activations" and not plan.training:
        return "what the model returns"
    return KINDS.get(kind, kind).format(optimizer=plan.optimizer)


def memory_table(plan: Plan) -> Table:
    available = allowed(plan)
    used = sum(plan.memory.values())
    rows: list[tuple] = [
        (kind_of_memory(plan, kind), units.nbytes(size),
         units.bar(size / max(used, available), 30))
        for kind, size in plan.memory.items()
        if size
    ]  # fmt: skip
    fits = used <= available
    verdict = f"of {room(plan)}: " + ("fits" if fits else "does NOT fit")
    total = (
        line(("total", "bold")),
        line((units.nbytes(used), "bold")),
        line((verdict, "green" if fits else "bold red")),
    )
    rows += [("-",), total]
    return table("Memory per device, when it needs most", ("!", ">bytes", "!"), rows)


def allowed(plan: Plan) -> float:
    """Bytes that a device has for the plan."""
    return plan.limit or plan.cluster["device"]["memory_bytes"]


def room(plan: Plan) -> str:
    """That much, and what a device has where a reserve, or whoever asked, leaves less."""
    has = plan.cluster["device"]["memory_bytes"]
    less = plan.limit and plan.limit < has
    return units.nbytes(allowed(plan)) + (f" (a device has {units.nbytes(has)})" if less else "")


def baselines_table(plan: Plan) -> Table | None:
    if not plan.baselines:
        return None
    available = allowed(plan)

    def memory(size: float) -> str:
        return units.nbytes(size) + ("" if size <= available else " (does not fit)")

    own = sum(plan.memory.values())
    ours = line((units.seconds(plan.cost), "bold green"))
    rows: list[tuple] = [(line(("this plan", "bold green")), ours, "", memory(own), "")]
    *outer, last = plan.mesh["names"]
    rest = f", batch over {', '.join(outer)}" if outer else ""
    for name, figures in plan.baselines.items():
        words = STRATEGIES.get(name, "").format(last=last, rest=rest)
        if figures.get("cost") is None:
            rows.append((name, "–", "", "", f"not applicable: {figures.get('why', 'no reason given')}"))
        else:
            ratio = units.slower(figures["cost"] / plan.cost if plan.cost else 1.0)
            rows.append((name, units.seconds(figures["cost"]), ratio, memory(figures.get("memory", 0)), words))
    columns = ("!strategy", ">step time", "!than this plan", "!memory", "what it does")
    return table("Compared with known strategies, each at its best by the same cost model", columns, rows)


def warnings_text(plan: Plan) -> Text | None:
    if not plan.warnings:
        return None
    return Text("\n").join(line(("warning: ", "bold yellow"), w) for w in plan.warnings)


ELSE = "What else an operator or a weight could do, and what the step would take then: tapas explain, or --report."


def plan_page(plan: Plan) -> Group:
    return page(
        (
            header(plan), verdict(plan), FitToWidth(lambda width: weights_table(plan, width)),
            FitToWidth(lambda width: sent_table(plan, width)) if sent(plan) else None,
            FitToWidth(lambda width: blocks_table(plan, width)), memory_table(plan), baselines_table(plan),
            legend(plan).append(f" {ELSE}"), warnings_text(plan),
        )
    )  # fmt: skip


def plan_text(plan: Plan) -> str:
    """The plan as plain text."""
    return text_of(plan_page(plan))


def print_plan(plan: Plan, console: Console) -> None:
    print_to(plan_page(plan), console)
