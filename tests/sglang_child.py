"""An engine of SGLang's in a process of its own: SOCKET LAYOUT COUNT. It looks for a prompt of so many pages, and says
how many tokens are hits and SHA-256 of the pages that it loaded."""

import json
import sys

from tests.sglang_released import PAGE, Engine, digest, pool_of

socket, layout, count = sys.argv[1:]
engine = Engine(socket, pool_of("mha", layout))
hit, pages = engine.prefetch(list(range(7, 7 + int(count) * PAGE)))
engine.close()
sys.stdout.write(json.dumps({"hit": hit, "sha256": digest(pages)}))
