"""The verbs index, search and serve: photos found by words. No torch at import, so that help is instant."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from kiloword.config.execution import Device, Execution, Flat
from kiloword.config.settings import check, setting
from kiloword.errors import count, needs
from kiloword.files import write_json
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say, warn


@dataclass(frozen=True, kw_only=True)
class Index(Execution):
    """Make or update a library of photos, for search and serve.

    The same command again encodes new and changed photos, and forgets deleted ones. After an interruption it resumes.

    Examples:
      kiloword index photos --model runs/first/model --out library
    """

    photos: Positional[Path]  # folder of photos, with its subfolders; captions are not needed
    out: Path  # folder of the library
    model: str | None = None  # model folder, or open_clip:NAME:FILE, hf:FOLDER; default: the library's model
    trust: Flat[Trust] = NONE  # code that the model folder may run
    dim: int | None = None  # keep the first N numbers of the vectors, normalised again; default: all
    forget: bool = False  # forget photos that are no longer in the folder, even if these are most of the library

    def run(self) -> None:
        """Run and print `kiloword index`. Raises: ValueError for options that do not fit the library."""
        from kiloword.apps.search.index import run

        run(self)


@dataclass(frozen=True, kw_only=True)
class Search(Device):
    """Search photos by words or by a photo.

    Examples:
      kiloword search library "a dog on the beach"
      kiloword search library dog.jpg --page like.html
      kiloword search library "a dog" --also 0.5 beach.jpg -1 snow
    """

    library: Positional[Path]  # folder that `kiloword index` wrote
    query: Positional[str]  # what the photos should show, or the file of a photo that they should resemble
    also: tuple[tuple[float, str], ...] = ()  # further words and photos, each after the weight of its score
    top: int = setting(10, "number of photos", 1)
    within: str = ""  # text that the paths of the photos must contain, such as a folder
    json: Path | None = None  # write the results to this file
    page: Path | None = None  # write a page with the photos to this file
    model: str | None = None  # model folder, if it has moved since the library was made
    trust: Flat[Trust] = NONE  # code that the model folder may run

    def run(self) -> None:
        """Search and print. Raises: ValueError for a query, an image or a library that cannot be used."""
        from kiloword.apps.search.index import opened_for
        from kiloword.apps.search.library import Library
        from kiloword.apps.search.rank import find, listed, shrunk
        from kiloword.data.folders import is_image
        from kiloword.report import Gallery, Page, Tile, made_by, write_page

        check(self)
        library = Library(self.library)
        matcher, began = opened_for(self, library), time.perf_counter()
        parts = [(1.0, self.query), *self.also]
        query: Any = [(Path(part) if is_image(Path(part).name) else part, weight) for weight, part in parts]
        found = find(library, matcher, query, self.top, self.within)
        seconds, results, tiles = time.perf_counter() - began, listed(library, found), list[Tile]()
        for n, one in enumerate(results, 1):
            unsure = () if one["uncertainty"] is None else (f"u {one['uncertainty']:.4g}",)
            line = [f"{n:2}", f"{one['score']:6.3f}", *unsure, one["path"]]
            say("  ".join(line))
            if self.page is not None:
                try:
                    tiles.append(Tile(shrunk(library.photo(one["row"]), 320), line))
                except ValueError as error:
                    warn(f"{one['path']}: {error}")
        where = f" whose path has {self.within!r}" if self.within else ""
        say(f"{len(found)} of {len(library):,} photos{where}, {1000 * seconds:.0f} ms")
        asked = " ".join([self.query, *(f"{weight:+g} {part}" for weight, part in self.also)])
        if self.json is not None:
            about = {"query": asked, "folder": library.file.folder, "photos": len(library)}
            write_json(self.json, about | {"results": results})
        if self.page is not None:
            intro = f"The best {len(found)} of {len(library):,} photos."
            if "uncertainty" in library.features:
                intro += " u is a photo's uncertainty, high where it fits many texts."
            facts = made_by([self.model or library.file.model], library.file.folder)
            write_page(self.page, Page(f"“{asked}”", intro, {"Photos": [Gallery(tiles)]}, facts))
            say(f"page: {self.page}")


@dataclass(frozen=True, kw_only=True)
class Serve(Device):
    """Search photos in a browser.

    Examples:
      kiloword serve library
    """

    library: Positional[Path]  # folder that `kiloword index` wrote
    host: str = "127.0.0.1"  # address to listen on; only this machine reaches the default
    port: int = setting(8321, "port to listen on; 0: any free port", 0, 65535)
    model: str | None = None  # model folder, if it has moved since the library was made
    trust: Flat[Trust] = NONE  # code that the model folder may run

    def run(self) -> None:
        """Serve until Ctrl-C. Raises: ValueError for a port in use, or a library of another model."""
        import socket

        from kiloword.apps.search.index import opened_for
        from kiloword.apps.search.library import Library

        try:
            import uvicorn

            from kiloword.apps.search.site import HEADERS, application
        except ImportError:
            raise ValueError(needs("kiloword serve", "starlette", "search")) from None
        check(self)
        library, family = Library(self.library), socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listening = socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise ValueError(
                f"--host {self.host} --port {self.port} cannot be used ({error}): choose another --port, or 0 for any."
            ) from None
        with listening:
            app = application(library, opened_for(self, library), self.host)
            at = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{listening.getsockname()[1]}/"
            say(f"{self.library}: {count(len(library), 'photo')} at {at} (Ctrl-C ends it)")
            if self.host not in ("localhost", "::1") and not self.host.startswith("127."):
                warn("everybody who reaches this address can search and see the photos.")
            logging.disable()  # queries are private
            config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", headers=HEADERS)
            config.timeout_graceful_shutdown, config.server_header = 1, False
            try:
                uvicorn.Server(config).run([listening])
            except KeyboardInterrupt:
                say("stopped.")
