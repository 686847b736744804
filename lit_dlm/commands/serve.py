"""``lit-dlm serve``: a model behind OpenAI's interface."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address

from jsonargparse.typing import NonNegativeInt, PositiveInt

from lit_dlm.commands.generation import add_decoding_arguments, built
from lit_dlm.config.files import compose
from lit_dlm.config.parser import Parser
from lit_dlm.system.options import within


@dataclass(kw_only=True)
class ServerOptions:
    """Options of the command, besides those of a model and a decoder.

    Args:
        response_length: Cells to fill where a request has no max_tokens.
        host: Address to listen at; one that others reach needs a key.
        port: Port to listen at; 0 takes a free one.
        max_waiting: Responses that may wait for a slot (--batch_size are decoded at once).
        api_key: Bearer token that requests must have, by default that of LIT_DLM_API_KEY.
    """

    response_length: PositiveInt = 128
    host: str = "127.0.0.1"
    port: NonNegativeInt = 8000
    max_waiting: NonNegativeInt = 256
    api_key: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name."""
    parser = Parser(
        prog="lit-dlm serve",
        description="Answers OpenAI's requests for chat and text completions with a model. The "
        "decoder is that of --config, a decode file such as configs/decode/threshold_09.yaml, and "
        "of --policy, --window, --quota, --sampler, --cache, --layout and --settings.",
    )
    parser.add_argument("model", nargs="?", type=str, help="Like --backbone: a name, folder or id.")
    parser.add_class_arguments(ServerOptions, None)
    add_decoding_arguments(parser)
    config = parser.parse_composed(compose(arguments))
    # Before the model is loaded, which takes minutes; the extra may be missing.
    from lit_dlm.serve.api import Server, application
    from lit_dlm.serve.engine import Engine

    api_key = config.api_key or os.environ.get("LIT_DLM_API_KEY")
    with _bound(config.host, int(config.port), has_key=bool(api_key)) as listening:
        config.backbone = named = config.model or config.backbone
        backbone, tokenizer, decoder = built(parser, config)
        name = named if isinstance(named, str) else named.init_args.path
        limits = {"num_slots": config.batch_size, "max_waiting": config.max_waiting}
        engine = Engine(backbone, tokenizer, decoder, **limits)
        settings = {"response_length": config.response_length, "seed": config.seed}
        app = application(engine, name, **settings, api_key=api_key)
        Server(app, engine, _welcome(name, listening, api_key)).run_until_closed(listening)
    return 0


def _bound(host: str, port: int, *, has_key: bool) -> socket.socket:
    """Returns a socket that nobody else has and that does not listen yet."""
    within("[0, 65535]", port=port)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not (has_key or ip_address(address[0]).is_loopback):
            wanted = "expected --api_key, or LIT_DLM_API_KEY in the environment"
            raise ValueError(f"host: others reach {host}, so {wanted}, got none")
        with ExitStack() as unless_bound:
            found = unless_bound.enter_context(socket.socket(family))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            unless_bound.pop_all()
    except OSError as error:
        raise ValueError(f"port: expected a free one of {host}, got {port} ({error})") from None
    return found


def _welcome(name: str, listening: socket.socket, api_key: str | None) -> str:
    host, port, *_ = listening.getsockname()
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    headers = ["Content-Type: application/json", *["Authorization: Bearer ..."] * bool(api_key)]
    options = " ".join(f"-H '{one}'" for one in headers)
    return (
        f"{name} answers at {url} (Ctrl-C: after the running answers)\n"
        f"next: curl {url}/chat/completions {options} -d '{body}'\n"
    )
