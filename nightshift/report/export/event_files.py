"""Event files that TensorBoard reads: a folder an experiment, its steps as curves, its config and scores as hparams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nightshift.campaign.records import Record
from nightshift.config.train_toml import spelled
from nightshift.errors import EngineError
from nightshift.files import whole_folder
from nightshift.report.data import span
from nightshift.report.export.story import Row, Story, measured, scores

FIX = "Install the extra: uv run --extra tensorboard nightshift export --to tensorboard."
EVENTS_NAME = "events.out.tfevents.0.nightshift"


def write_events(story: Story, folder: Path) -> Path:
    """Write a new folder: `0042` in it has the scores and the curves of an experiment. EngineError where the package is
    not installed."""
    try:
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise EngineError("the package tensorboard is not installed", FIX) from None
    with whole_folder(folder) as partial:
        for record, each in story.rows():
            place = partial / f"{each['number']:04d}"
            place.mkdir()
            with (place / EVENTS_NAME).open("xb") as file:
                writer = RecordWriter(file)
                for event in _events(story, record, each):
                    writer.write(event.SerializeToString())
                writer.flush()
    return folder


def _events(story: Story, record: Record, each: Row) -> list[Any]:
    from tensorboard.compat.proto.event_pb2 import Event

    began, ended = (moment.timestamp() for moment in span(each["started"], each["total_seconds"]))
    events = [Event(wall_time=began, file_version="brain.Event:2"), *_hparams(story, each, began, ended)]
    events += [_scalar(f"score/{name}", value, 0, ended) for name, value in scores(record, each).items()]
    for step in story.steps(record):
        at = began + (step.time or 0.0)
        events += [_scalar(f"training/{name}", value, step.step, at) for name, value in measured(step).items()]
    return events


def _scalar(tag: str, value: float, step: int, at: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=at, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def _hparams(story: Story, each: Row, began: float, ended: float) -> Iterator[Any]:
    """The config of an experiment, for the tab HPARAMS, and how it ended, if it has; the plugin's own `summary` wants
    TensorFlow for it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    config = story.configs.get(each["number"])
    resolved = config.resolved if config else {}
    start = plugin_data_pb2.SessionStartInfo(group_name=f"{each['number']:04d}", start_time_secs=began)
    for path in {path for config in story.configs.values() for path in config.values} & resolved.keys():
        value = resolved[path]
        if isinstance(value, bool):
            start.hparams[path].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[path].number_value = value
        else:
            start.hparams[path].string_value = spelled(value)
    has_failed = each["outcome"] in ("crashed", "interrupted")
    status = api_pb2.STATUS_FAILURE if has_failed else api_pb2.STATUS_SUCCESS
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended)
    told: list[tuple[str, float, Any]] = [(metadata.SESSION_START_INFO_TAG, began, {"session_start_info": start})]
    if each["outcome"] != "undecided":
        told.append((metadata.SESSION_END_INFO_TAG, ended, {"session_end_info": end}))
    for tag, at, info in told:
        content = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **info)
        about = metadata.create_summary_metadata(content)
        value = Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
        yield Event(wall_time=at, summary=Summary(value=[value]))
