"""A rollout engine of your own: a server answers, with the adapter as it is by then.

In the folder of this file, add these lines to an experiment with ``RolloutDataModule``::

    data:
      init_args:
        engine:
          class_path: rollout_engine.ServerEngine
          init_args:
            model: tiny
            decoder: ${model.init_args.decoders.rollout}
            folder: ${run_dir}/served
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from lit_dlm.rl.engine import RolloutPrompt
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.trajectories.record import Trajectory


class ServerEngine:
    """Starts ``lit-dlm serve`` for each RL step and asks it for the responses.

    Args:
        model: what the server serves, the backbone of the experiment.
        decoder: settings of the server's decoder.
        folder: where the server finds them, and the present adapter.
        batch_size: responses decoded together.
    """

    def __init__(
        self, model: str, decoder: dict[str, Any], folder: str, batch_size: int = 64
    ) -> None:
        self.model = model
        self.decoder = decoder
        self.folder = Path(folder)
        self.batch_size = batch_size

    def records(self, prompts: Sequence[RolloutPrompt], module: TraceRLModule) -> list[Trajectory]:
        """Returns a record for each prompt."""
        module.export(self.folder / "adapter")
        (self.folder / "decoder.yaml").write_text(json.dumps(self.decoder))
        with self._server() as url, ThreadPoolExecutor(self.batch_size) as threads:
            answers = threads.map(lambda one: self._answer(url, one), prompts)
            return [
                prompt.record(module.backbone, one["tokens"], one["steps"], one["log_probs"])
                for prompt, one in zip(prompts, answers, strict=True)
            ]

    @contextmanager
    def _server(self) -> Iterator[str]:
        """Starts the server and yields its address."""
        program = Path(sys.executable).with_name("lit-dlm")
        command = [
            program,
            "serve",
            self.model,
            "--port",
            "0",
            "--batch_size",
            str(self.batch_size),
        ]
        command += ["--adapter", self.folder / "adapter", "--config", self.folder / "decoder.yaml"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                told = server.stdout.readline()  # tiny answers at http://127.0.0.1:40123/v1 (...)
                yield told.partition(" answers at ")[2].split()[0]
            finally:
                server.terminate()

    def _answer(self, url: str, prompt: RolloutPrompt) -> dict[str, Any]:
        """Asks for one response, and how each of its tokens was written."""
        body = {
            "model": self.model,
            "prompt": prompt.prompt_ids,  # no text: the chat template is applied
            "max_tokens": prompt.response_length,
            "seed": zlib.crc32(prompt.uid.encode()),
            "trajectory": True,
        }
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{url}/completions", json.dumps(body).encode(), headers)) as answer:
            found: dict[str, Any] = json.load(answer)["choices"][0]["trajectory"]
        return found
