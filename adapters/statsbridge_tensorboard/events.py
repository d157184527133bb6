"""Values as TensorBoard's messages. The only module here that imports tensorboard: imported when the adapter opens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT, DT_STRING

from statsbridge.mirror import Histogram, Point, Reading

from .names import HISTOGRAM, TEXT, tag_of


def _metadata(plugin: str, data_class: int) -> SummaryMetadata:
    return SummaryMetadata(
        plugin_data=SummaryMetadata.PluginData(plugin_name=plugin),
        data_class=data_class,
    )


SCALARS = _metadata("scalars", DATA_CLASS_SCALAR)
HISTOGRAMS = _metadata("histograms", DATA_CLASS_TENSOR)
TEXTS = _metadata("text", DATA_CLASS_TENSOR)


def version(created: float) -> bytes:
    """The record that an event file begins with; `created`: seconds, where the page's time axis begins."""
    source = SourceMetadata(writer="statsbridge")
    return _bytes(Event(wall_time=created, file_version="brain.Event:2", source_metadata=source))


class Scalars:
    """Encodes scalars, of which there are many: what does not change of a curve's values is encoded once.

    The page of TensorBoard's fast loader shows nothing but float32 scalars, and hides all others. So a tensor of
    type float32 holds the value twice: rounded, for the page, and exact, in the field for doubles.
    """

    def __init__(self) -> None:
        self._beginnings: dict[str, bytes] = {}

    def events(self, points: Sequence[Point], introduced: set[str]) -> Iterator[bytes]:
        """One event for all neighbouring points of one step and time."""
        ends = _ends([point.value for point in points])
        for (step, time), group in groupby(zip(points, ends, strict=True), key=_moment):
            parts: list[bytes] = []
            for point, end in group:
                tag = tag_of(point.series)
                if tag in introduced:
                    parts += (self._beginnings.get(tag) or self._begin(tag), end)
                else:
                    event = Event()
                    tensor = _add(event, tag, DT_FLOAT, SCALARS, introduced)
                    tensor.float_val.append(point.value)
                    tensor.double_val.append(point.value)
                    parts.append(event.summary.SerializeToString())
            summary = Summary.FromString(b"".join(parts))
            yield _bytes(Event(step=step, wall_time=time / 1e6, summary=summary))

    def _begin(self, tag: str) -> bytes:
        beginning = self._beginnings[tag] = _zero(tag)[: -END.itemsize]
        return beginning


END = np.dtype([("rounded", "<f4"), ("field", "<u2"), ("exact", "<f8")])
"""How an encoded scalar ends: the float32; that a packed field of doubles of 8 bytes follows; the double."""
FIELD = int.from_bytes([TensorProto.DOUBLE_VAL_FIELD_NUMBER << 3 | 2, 8], "little")


def _ends(values: Sequence[float]) -> Iterator[bytes]:
    ends = np.empty(len(values), END)
    ends["field"], ends["exact"] = FIELD, values
    with np.errstate(over="ignore"):  # beyond float32 the page shows infinity
        ends["rounded"] = ends["exact"]
    data = ends.tobytes()
    return (data[begin : begin + END.itemsize] for begin in range(0, len(data), END.itemsize))


def _moment(item: tuple[Point, bytes]) -> tuple[int, int]:
    return item[0].step, item[0].time


def _zero(tag: str) -> bytes:
    """A summary of one scalar, zero."""
    tensor = TensorProto(dtype=DT_FLOAT, float_val=[0], double_val=[0])
    data: bytes = Summary(value=[Summary.Value(tag=tag, tensor=tensor)]).SerializeToString()
    return data


if not _zero("any").endswith(next(_ends([0.0]))):
    raise ImportError("this version of protobuf writes fields in an order that is not known here")


def histogram(item: Histogram, introduced: set[str]) -> bytes:
    """Buckets as they were counted, uneven ones too: float64 of shape [buckets, 3], left, right, count."""
    buckets = np.stack([item.edges[:-1], item.edges[1:], item.counts], axis=1).astype("<f8")
    event = Event(step=item.step, wall_time=item.time / 1e6)
    tensor = _add(event, item.series.name + HISTOGRAM, DT_DOUBLE, HISTOGRAMS, introduced)
    tensor.tensor_content = buckets.tobytes()
    for size in buckets.shape:
        tensor.tensor_shape.dim.add(size=size)
    return _bytes(event)


def text(name: str, markdown: str, step: int, seconds: float, introduced: set[str]) -> bytes:
    """A text in Markdown."""
    event = Event(step=step, wall_time=seconds)
    tensor = _add(event, name + TEXT, DT_STRING, TEXTS, introduced)
    tensor.string_val.append(markdown.encode())
    tensor.tensor_shape.dim.add(size=1)
    return _bytes(event)


def restart(step: int, seconds: float) -> bytes:
    """What makes TensorBoard drop all that it has of the run from `step` on."""
    return _bytes(Event(step=step, wall_time=seconds, session_log=SessionLog(status=SessionLog.START)))


def readings(payload: bytes) -> Iterator[Reading]:
    """The scalars of one record. Where the rounded value, which the page shows, is not the exact one's, that one."""
    event = Event.FromString(payload)
    for value in event.summary.value:
        if value.tag.endswith((HISTOGRAM, TEXT)):
            continue
        tensor = value.tensor
        shown = tensor.float_val[0] if tensor.float_val else value.simple_value
        exact = tensor.double_val[0] if tensor.double_val else shown
        kept = exact if _rounded(exact) == _rounded(shown) else shown
        yield Reading(value.tag, event.step, round(event.wall_time * 1e6), kept)


def _rounded(value: float) -> bytes:
    with np.errstate(over="ignore"):
        return b"NaN" if math.isnan(value) else np.float32(value).tobytes()


def _add(event: Event, tag: str, dtype: int, metadata: SummaryMetadata, introduced: set[str]) -> TensorProto:
    """The tensor, still without values, of a new value of `tag`."""
    value = event.summary.value.add()
    value.tag = tag
    if tag not in introduced:  # the first value of a curve in a file says what it is
        value.metadata.CopyFrom(metadata)
        introduced.add(tag)
    value.tensor.dtype = dtype
    return value.tensor


def _bytes(event: Event) -> bytes:
    data: bytes = event.SerializeToString()
    return data
