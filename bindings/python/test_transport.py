# SPDX-License-Identifier: Apache-2.0

"""Tests what the client does with proxies and with errors, against servers of its own:
python3 test_transport.py."""

import datetime
import email.utils
import http.server
import json
import os
import threading
import unittest
import unittest.mock

from kvroute.client import KvPushRouter, RouterError, _seconds


class Server:
    """An HTTP server that notes what it is asked and answers always the same."""

    def __init__(self, status, answer, **headers):
        self.seen = seen = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                seen.append(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_CONNECT = do_POST

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def answer(error):
    return json.dumps({"error": error}).encode()


class GenerateTest(unittest.TestCase):
    def test_events_have_token_ids_where_the_engine_returns_them(self):
        events = (
            b'data: {"choices": [{"text": "a", "token_ids": [7, 8]}]}\n\n'
            b'data: {"choices": [{"text": "b"}]}\n\n'
            b'data: {"choices": [], "usage": {}}\n\n'
            b"data: [DONE]\n\n"
        )
        with Server(200, events) as router:
            ask = KvPushRouter(f"http://127.0.0.1:{router.port}", "m", timeout=20)
            got = [event.get("token_ids") for event in ask.generate_sync([1])]
        self.assertEqual(got, [[7, 8], None, None])


class ProxyTest(unittest.TestCase):
    def test_proxies_of_the_environment_are_not_used(self):
        result = json.dumps({"worker_id": 1, "dp_rank": 0, "overlap_blocks": 0}).encode()
        with Server(502, b"the proxy") as proxy, Server(200, result) as router:
            url = f"http://127.0.0.1:{proxy.port}"
            names = "http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY".split()
            for no_proxy in {}, {"no_proxy": "example.org"}:
                with unittest.mock.patch.dict(os.environ, {**dict.fromkeys(names, url), **no_proxy}):
                    for host in "127.0.0.1", "localhost":
                        ask = KvPushRouter(f"http://{host}:{router.port}", "m", timeout=20, token="secret")
                        self.assertEqual(ask.best_worker_sync([1]), (1, 0, 0))
                        ask.generate_sync([1]).close()
                    # Nor where there is nobody.
                    with self.assertRaises(OSError):
                        KvPushRouter("http://127.0.0.1:1", "m", timeout=20).best_worker_sync([1])
            self.assertEqual(proxy.seen, [])
            self.assertEqual(len(router.seen), 8)

    def test_a_proxy_would_be_seen(self):
        """The test above can fail: the standard library's default uses these."""
        import urllib.request

        with Server(502, b"the proxy") as proxy:
            url = f"http://127.0.0.1:{proxy.port}"
            with unittest.mock.patch.dict(os.environ, {"http_proxy": url, "HTTP_PROXY": url, "no_proxy": "", "NO_PROXY": ""}):
                with self.assertRaises(OSError):
                    urllib.request.build_opener().open(urllib.request.Request("http://127.0.0.1:1/", data=b"", method="POST"), timeout=20)
            self.assertEqual(len(proxy.seen), 1)


class RetryTest(unittest.TestCase):
    def test_retry_after(self):
        now = datetime.datetime.now(datetime.timezone.utc)
        soon = now + datetime.timedelta(seconds=90)
        for said, least, most in (
            ("5", 5, 5),
            (" 0 ", 0, 0),
            (email.utils.format_datetime(soon, usegmt=True), 60, 90),
            (email.utils.format_datetime(soon.astimezone(datetime.timezone(datetime.timedelta(hours=2)))), 60, 90),
            (soon.strftime("%a, %d %b %Y %H:%M:%S -0000"), 60, 90),
            (soon.strftime("%A, %d-%b-%y %H:%M:%S GMT"), 60, 90),
            (soon.strftime("%a %b %d %H:%M:%S %Y"), 60, 90),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 0, 0),
        ):
            with self.subTest(said):
                got = _seconds(said)
                self.assertIsNotNone(got)
                self.assertTrue(least <= got <= most, got)
        for said in None, "", "soon", "-5", "1e3", "nan", "inf", "1.5", "٣", "Sun, 99 Nov 1994 99:49:37 GMT", "Wed, 01 Jan 99999999 00:00:00 GMT", "9" * 400, "x" * 100_000:
            with self.subTest(str(said)[:40]):
                self.assertIsNone(_seconds(said))

    def test_errors_have_it(self):
        error = answer({"message": "full", "code": "queue_full", "param": None})
        later = email.utils.format_datetime(datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1), usegmt=True)
        for retry, least, most in ("7", 7, 7), (later, 3500, 3600):
            with Server(429, error, Retry_After=retry) as router:
                for ask in KvPushRouter(f"http://127.0.0.1:{router.port}", "m", timeout=20).best_worker_sync, KvPushRouter(
                    f"http://127.0.0.1:{router.port}", "m", timeout=20
                ).generate_sync:
                    with self.assertRaises(RouterError) as caught:
                        ask([1])
                    self.assertEqual((caught.exception.status, caught.exception.code), (429, "queue_full"))
                    self.assertTrue(least <= caught.exception.retry_after <= most, caught.exception.retry_after)
        with Server(503, b"not JSON", Retry_After="whenever") as router:
            with self.assertRaises(RouterError) as caught:
                KvPushRouter(f"http://127.0.0.1:{router.port}", "m", timeout=20).best_worker_sync([1])
            self.assertIsNone(caught.exception.retry_after)
            self.assertEqual(str(caught.exception), "not JSON")


if __name__ == "__main__":
    unittest.main(verbosity=2)
