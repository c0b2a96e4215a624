# SPDX-License-Identifier: Apache-2.0

"""Tests the client against a running kvroute whose API wants a token:
python3 test_token.py URL MODEL TOKEN."""

import http.server
import json
import sys
import threading
import unittest

from kvroute.client import KvPushRouter, RouterError

URL, MODEL, TOKEN = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
PROMPT = list(range(1000, 1064))


class TokenTest(unittest.TestCase):
    def test_with_the_token(self):
        router = KvPushRouter(URL, MODEL, timeout=20, token=TOKEN)
        self.assertEqual(router.best_worker_sync(PROMPT)[1], 0)
        self.assertEqual(len(router.get_potential_loads_sync(PROMPT)), 1)
        self.assertEqual(json.loads(router.dump_events_sync()), [])
        self.assertTrue(list(router.generate_sync(PROMPT)))

    def test_without_it(self):
        for token, why in (None, "no header"), (TOKEN + "x", "not one of"):
            router = KvPushRouter(URL, MODEL, timeout=20, token=token)
            for ask in router.best_worker_sync, router.generate_sync:
                with self.assertRaises(RouterError) as caught:
                    ask(PROMPT)
                self.assertEqual((caught.exception.status, caught.exception.code), (401, "unauthorized"))
                self.assertIn(why, str(caught.exception))

    def test_it_stays_at_its_host(self):
        seen = []

        class Other(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
                self.end_headers()

            def do_GET(self):
                seen.append(self.headers.get("Authorization"))
                self.send_response(404)
                self.end_headers()

            def log_message(self, *_):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Other)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with self.assertRaises(RouterError):
                KvPushRouter(f"http://127.0.0.1:{server.server_port}", MODEL, timeout=20, token=TOKEN).best_worker_sync(PROMPT)
        finally:
            server.shutdown()
            server.server_close()
        self.assertEqual(seen, [None])


if __name__ == "__main__":
    unittest.main(verbosity=2)
