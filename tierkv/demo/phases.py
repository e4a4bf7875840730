# SPDX-License-Identifier: Apache-2.0
"""The main job, measured: the same documents asked about in five phases.

| phase | server | what it shows |
|---|---|---|
| none | vLLM alone, documents do not fit | every prompt is computed |
| apc | vLLM alone, everything fits | the floor: vLLM's own prefix cache |
| cold | TierKV, documents do not fit | what saving costs: nothing is cached yet |
| dram | the same server | loads from DRAM |
| disk | the same, stopped and started again | loads from disk |

What is compared is measured side by side, in turns, so that a busy machine is busy for both:
`cold` with `none`, `dram` with `apc`, and `disk` with `dram` in the restarted server, where each
document is asked about once more when enough others have driven it out of vLLM's own cache. Never
more than two servers run at a time: each takes about 2 GB of memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tierkv.demo.client import Answer, Client
from tierkv.demo.plan import (
    BLOCK_TOKENS,
    BLOCKS_CACHED,
    Plan,
    large_space,
    small_space,
    tierkv_arguments,
    vllm_arguments,
    write_config,
)
from tierkv.demo.ports import free_port
from tierkv.demo.progress import Reporter
from tierkv.demo.server import Server
from tierkv.demo.workload import Document, build_documents

WARM_UP = 0
"""Index of the document whose figures are thrown away, in each pass over the documents."""
LAG = 3
"""More documents than vLLM's own small space holds."""
GROUP = 2
"""Documents asked about in one phase before it is the other one's turn. Few: what disturbs this
machine should disturb both."""
WAKE_UP = "Hello."
"""Asked after each pause, not measured: threads that slept cost the next request some of its time,
which is a third of a hit's."""
QUIET_S = 1.2
"""Seconds. vLLM's processes spin for one second after their last message: a server that was just
asked takes processor time from the next one, which on two cores is half of what is measured."""
START_STEPS = 15
"""Starting a server takes about as long as so many requests."""


class Phase(StrEnum):
    """The phases, in the order in which they are shown."""

    NONE = "none"
    APC = "apc"
    COLD = "cold"
    DRAM = "dram"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request.

    Attributes:
        phase: where it was measured.
        document: index of the document.
        question: number of the question about it.
        turn: requests about one document with the same turn were measured side by side.
        answer: what came back.
        hit_tokens: cached prompt tokens by tier, from the server's own counters.
    """

    phase: Phase
    document: int
    question: int
    turn: str
    answer: Answer
    hit_tokens: Mapping[str, int]


@dataclass(slots=True)
class Record:
    """Everything that was measured; grows while the demo runs."""

    documents: list[Document] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    kept: Server | None = None

    def of(self, phase: Phase) -> list[Sample]:
        """The samples of one phase."""
        return [sample for sample in self.samples if sample.phase is phase]


@dataclass(slots=True)
class Host:
    """A running server and the connection to it."""

    server: Server
    client: Client


class Demo:
    """Runs the phases.

    Args:
        plan: how much to measure.
        model: directory of the model.
        folder: logs, configuration, disk tier, and all that the servers write; empty.
        port: of the TierKV server; None takes a free one.
        report: told what goes on.
    """

    def __init__(
        self, plan: Plan, model: Path, folder: Path, port: int | None, report: Reporter
    ) -> None:
        self._plan = plan
        self._model = model
        self._folder = folder
        self._port = port
        self._report = report
        self._ports = {port}
        self._config = write_config(folder)
        self.record = Record()

    def run(self, keep: bool = False) -> Record:
        """Measure everything.

        Args:
            keep: leave the last TierKV server running; it is then in `Record.kept`, and the
                caller lets it go with `Server.keep` or stops it.

        Raises:
            DemoError: a server did not start, died, or failed a request. No server is left.
        """
        plan = self._plan
        self._report.begin(plan.requests + START_STEPS * plan.starts)
        with ExitStack() as stack:
            tierkv = self._start(stack, "tierkv")
            none = self._start(stack, "vllm-alone")
            self._wait(tierkv, none)
            self._report.stage("cutting documents to size")
            self.record.documents = build_documents(
                none.client.count_tokens,
                count=plan.documents + 1,
                cached_tokens=BLOCKS_CACHED * BLOCK_TOKENS,
                block_tokens=BLOCK_TOKENS,
                answer_tokens=plan.answer_tokens,
            )
            self._report.stage("each document for the first time, without and with TierKV")
            self._measure({Phase.NONE: none, Phase.COLD: tierkv}, question=0, turn="first")
            self._stop(none)

            apc = self._start(stack, "vllm-alone-all-cached")
            self._wait(apc)
            self._report.stage("filling vLLM's own prefix cache")
            for document in self._order():
                self._ask(apc, document, 0)
            for turn in range(plan.rounds):
                self._report.stage(f"vLLM's own cache and TierKV from DRAM, round {turn + 1}")
                both = {Phase.APC: apc, Phase.DRAM: tierkv}
                self._measure(both, question=turn, turn=f"warm-{turn}")
            self._stop(apc)

            for turn in range(plan.restarts):
                self._stop(tierkv)
                tierkv = self._start(stack, f"tierkv-restarted-{turn + 1}")
                self._wait(tierkv)
                self._report.stage("TierKV after a restart: from disk, then from DRAM")
                self._measure_restarted(tierkv, turn)
            if keep:
                tierkv.client.close()
                self.record.kept = tierkv.server
                stack.pop_all()
        return self.record

    def _measure(self, hosts: dict[Phase, Host], *, question: int, turn: str) -> None:
        """Ask about every document in every phase of `hosts`, a few here, then the same there."""
        order = list(self._order())
        phases = list(hosts)
        for begin in range(0, len(order), GROUP):
            for phase in phases:
                time.sleep(QUIET_S)
                hosts[phase].client.ask(WAKE_UP, 1)
                for document in order[begin : begin + GROUP]:
                    self._sample(phase, hosts[phase], document, question, turn)
            phases.reverse()

    def _measure_restarted(self, tierkv: Host, restart: int) -> None:
        """Ask about every document twice: it comes from disk, and `LAG` documents later from DRAM.

        Each time with another question, as users would.
        """
        first, second = restart % self._plan.rounds, (restart + 1) % self._plan.rounds
        turn = f"restart-{restart}"
        documents = self._plan.documents + 1
        for step in range(documents + LAG):
            if step < documents:
                self._sample(Phase.DISK, tierkv, step, first, turn)
            if step >= LAG:
                self._sample(Phase.DRAM, tierkv, step - LAG, second, turn)

    def _sample(self, phase: Phase, host: Host, document: int, question: int, turn: str) -> None:
        """Ask, and keep what came of it, except for the warm-up document."""
        before = host.client.counters()
        answer = self._ask(host, document, question)
        if document != WARM_UP:
            hits = host.client.counters().since(before).hit_tokens
            sample = Sample(phase, document, question, turn, answer, hits)
            self.record.samples.append(sample)

    def _order(self) -> range:
        return range(self._plan.documents + 1)

    def _ask(self, host: Host, document: int, question: int) -> Answer:
        prompt = self.record.documents[document].prompt(question)
        answer = host.client.ask(prompt, self._plan.answer_tokens)
        self._report.step()
        return answer

    def _start(self, stack: ExitStack, name: str) -> Host:
        with_tierkv = name.startswith("tierkv")
        large = name == "vllm-alone-all-cached"
        blocks = large_space(self._plan) if large else small_space()
        arguments = vllm_arguments(self._model, blocks)
        if with_tierkv:
            arguments += tierkv_arguments(self._config)
        server = Server(
            name,
            arguments,
            port=self._port if with_tierkv and self._port else self._free_port(),
            folder=self._folder,
            log=self._folder / f"{name}.log",
        )
        stack.enter_context(server)
        server.start()
        client = Client(server)
        stack.callback(client.close)
        return Host(server, client)

    def _free_port(self) -> int:
        # A server that is still starting does not hold its port yet.
        while (port := free_port()) in self._ports:
            pass
        self._ports.add(port)
        return port

    def _wait(self, *hosts: Host) -> None:
        names = " and ".join(host.server.name for host in hosts)
        self._report.stage(f"starting vllm serve: {names}")
        for host in hosts:
            host.server.wait_ready()
            self._report.step(START_STEPS)

    def _stop(self, host: Host) -> None:
        self._report.stage(f"stopping vllm serve: {host.server.name}")
        host.client.close()
        host.server.stop()
