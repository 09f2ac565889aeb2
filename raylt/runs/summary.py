"""What a run comes to: figures from its reports, and the table that a person reads."""

from typing import Any

from rich import box
from rich.table import Table

from raylt.data.task import Task
from raylt.metrics import LOCAL, client_figures

Report = dict[str, Any]


def summarise(reports: list[Report], method: str, split_sha256: str, concluded: dict[str, str]) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        reports: lines of metrics.jsonl, oldest first; the last has an accuracy.
        concluded: what `Experiment.conclude` said.
    """
    rounds = [r for r in reports if r["phase"] == "round"]
    curve = [r["accuracy"] for r in rounds if r["accuracy"] is not None]
    final = reports[-1]
    spent = [r["figures"]["privacy"] for r in reports if "privacy" in r["figures"]]
    traffic = [t for r in reports for t in r["traffic"].values()]
    seconds = sum(r["seconds"] for r in rounds)
    return {
        "method": method,
        "split_sha256": split_sha256,
        "rounds": len(rounds),
        "accuracy": {
            "last": final["accuracy"],                          # of what is deployed in the end
            "last10": sum(curve[-10:]) / len(curve[-10:]),      # mean over the last ten judged rounds
            "last10_values": len(curve[-10:]),                  # of which there may be fewer
            "best": max([*curve, final["accuracy"]]),
        },
        "macro": final["macro"],
        "miou": final["miou"],
        "before_finish": rounds[-1]["accuracy"] if final["phase"] == "finish" else None,
        "groups_before_finish": rounds[-1]["groups"] if final["phase"] == "finish" else None,
        "global_accuracy": final["global_accuracy"],
        "global_macro": final["global_macro"],
        "global_miou": final["global_miou"],
        "quality": final.get("quality"),
        "groups": final["groups"],
        "clients": final["clients"]["matched"] | {"by": final["clients"]} | _by_sampling(reports),
        "others": {name: {key: figures[key] for key in ("accuracy", "macro", "miou", "groups", "clients")}
                   for name, figures in (final["others"] or {}).items()},
        "bytes": {"up": sum(t["up"] for t in traffic), "down": sum(t["down"] for t in traffic)},
        "seconds": sum(r["seconds"] + r["evaluation_seconds"] for r in reports),
        "seconds_per_round": seconds / len(rounds),
        "figures": final["figures"],                            # what the method reports of the last step
        "troubles": {kind: sum(len(r[kind]) for r in reports) for kind in ("lost", "retried", "rejected")},
        **({"privacy": spent[-1]} if spent else {}),
        **concluded,
    }


def _by_sampling(reports: list[Report]) -> dict[str, dict[str, Any] | None]:
    """The figures of the judged clients that took part in some round, and of those that never did; None of nobody."""
    ever = {id for report in reports for id in report["participants"]}
    found: dict[str, dict[str, Any] | None] = {}
    for name, wanted in (("sampled", True), ("never_sampled", False)):
        mine = {kind: [value for id, value in enumerate(values) if value is not None and (id in ever) == wanted]
                for kind, values in reports[-1]["by_client"].items()}
        count = len(mine["matched"])
        found[name] = {"count": count, **client_figures(mine)} if count else None
    return found


def table_of(summary: dict[str, Any], folder: str) -> Table:
    """The summary as a person reads it; accuracies in percent."""
    table = Table(show_header=False, title=f"{summary['method']}, rounds: {summary['rounds']}", title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    accuracy, clients = summary["accuracy"], summary["clients"]
    if local := clients["by"].get(LOCAL):
        table.add_row("clients, mean (own test images)", percent(local["mean"]))
        table.add_row("  worst decile", percent(local["worst_decile"]))
    table.add_row("accuracy, last", percent(accuracy["last"]))
    if summary["before_finish"] is not None:
        table.add_row("accuracy, before the last phase", percent(summary["before_finish"]))
    table.add_row(_last10(accuracy.get("last10_values")), percent(accuracy["last10"]))
    table.add_row("accuracy, best", percent(accuracy["best"]))
    if summary["task"] == "segmentation":
        table.add_row("mIoU, mAcc", f"{percent(summary['miou'])}, {percent(summary['macro'])}")
        table.add_row("global model: mIoU, mAcc, aAcc", ", ".join(
            percent(summary[f"global_{name}"]) for name in ("miou", "macro", "accuracy")))
        table.add_row("clients' mIoU, mean (own classes)", percent(clients["by"]["miou"]["mean"]))
    table.add_row("many / medium / few", " / ".join(percent(value) for value in summary["groups"].values()))
    if summary["groups_before_finish"] is not None:
        table.add_row("many / medium / few, before it",
                      " / ".join(percent(value) for value in summary["groups_before_finish"].values()))
    table.add_row("clients, mean (own class mix)", percent(clients["mean"]))
    table.add_row("clients, worst decile", percent(clients["worst_decile"]))
    if quality := summary.get("quality"):
        table.add_row("global model: AUC, calibration error",
                      f"{_share(quality['auc'])}, {_share(quality['calibration_error'])}")
    for name, figures in summary["others"].items():
        table.add_row(f"  judged by {name}", percent(figures["clients"]["matched"]["mean"]))
    if "privacy" in summary:
        budget = summary["privacy"]
        table.add_row("epsilon, delta", f"{budget['epsilon']:g}, {budget['delta']:g} for {budget['unit']}; without "
                                        f"{budget['not_covered'].partition(':')[0]}")
    parts = clients["sampled"], clients["never_sampled"]
    if all(parts):
        table.add_row("clients, ever / never sampled",
                      " / ".join(f"{percent(each['matched']['mean'])} ({each['count']})" for each in parts))
    if (new := summary["figures"].get("new_clients")) is not None:
        table.add_row("new clients, mean (own class mix)", f"{percent(new['matched'])} ({new['count']})")
    table.add_row("bytes up / down", f"{size(summary['bytes']['up'])} / {size(summary['bytes']['down'])}")
    table.add_row("seconds per round", f"{summary['seconds_per_round']:.2f}")
    troubles = {kind: count for kind, count in summary["troubles"].items() if count}
    if troubles:
        table.add_row("client calls", ", ".join(f"{count} {kind}" for kind, count in troubles.items()))
    for name, value in summary["figures"].items():
        if isinstance(value, str):                              # what a result must not be read without
            table.add_row(name, value)
    table.add_row("split sha256", summary["split_sha256"][:16])
    table.add_row("model sha256", summary["model_sha256"][:16])
    table.add_row("run folder", folder)
    return table


def _last10(values: int | None) -> str:
    """What the mean of the last ten is over."""
    return "accuracy, mean of the last 10" if values in (None, 10) else (
        "accuracy, the one judged round" if values == 1 else f"accuracy, mean of all {values} judged rounds")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def split_table(task: Task, width: int) -> Table:
    """Who holds what: clients by classes, or, where `width` columns are too few for it, each client in short."""
    heads = ("samples", "classes", "of the largest")
    first = max(map(len, task.client_names))
    whole = 21 + first + sum(max(len(name), 6) + 1 for name in task.class_names) <= width
    table = Table("client", *((*task.class_names, "samples") if whole else heads), box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for k, (row, size) in enumerate(zip(task.client_counts, task.sizes, strict=True)):
        if whole:
            table.add_row(task.client_names[k], *(_short(n) if n else "·" for n in row), str(size))
        else:
            largest = f"{task.class_names[row.argmax()]} {percent(row.max() / row.sum())}" if row.any() else ""
            table.add_row(task.client_names[k], str(size), str((row > 0).sum()), largest)
    table.add_section()
    if whole:
        table.add_row("all", *(_short(n) for n in task.counts), str(task.sizes.sum()))
        table.add_row("group", *task.groups, "")
    else:
        table.add_row("all", str(task.sizes.sum()), str(task.classes), "")
    return table


def _short(count: int) -> str:
    """Samples as they are; pixels in thousands or millions."""
    return str(count) if count < 100_000 else f"{count / 1e3:.0f}k" if count < 1e7 else f"{count / 1e6:.0f}M"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
