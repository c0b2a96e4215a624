# SPDX-License-Identifier: Apache-2.0
"""Records answers of a real kube-apiserver for the tests that read Kubernetes' API: internal/kubetest/testdata.

kubernetes-answers.py SERVERS FILE [FLAGS of kube-apiserver]

SERVERS is the binary that tools/kubernetes.sh builds (.cache/kubernetes/servers). etcd and kube-apiserver run on
loopback, without controllers: this script makes the objects, and plays the node. It sends the requests that
internal/kube sends, with small pages and short watches, and writes each request and its answer to FILE:

    GET PATH?QUERY
    STATUS CONTENT-TYPE
    the body, line by line

with an empty line behind each. Of an answer only metadata.managedFields are left out, half of its size. The recordings are those of

    kubernetes-answers.py .cache/kubernetes/servers internal/kubetest/testdata/kube-apiserver-1.34.txt
    kubernetes-answers.py .cache/kubernetes/servers internal/kubetest/testdata/kube-apiserver-1.33.txt --emulated-version=1.33

The second one is the same binary, which emulates 1.33: it refuses to stream lists (the last request of its file).
"""
import base64
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

ADMIN = "the-token-of-this-recording"
PODS = "/api/v1/namespaces/models/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/models/inferencepools"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/models/roles"
RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "resourceNames": ["llm"], "verbs": ["list", "watch"]},
]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """etcd and kube-apiserver in a folder."""

    def __init__(self, servers: str, folder: str, flags: list[str]):
        self.servers, self.folder, self.flags = servers, folder, flags
        self.etcd_port, self.port, peer = free_port(), free_port(), free_port()
        self.key = os.path.join(folder, "sa.key")
        subprocess.run(["openssl", "genrsa", "-out", self.key, "2048"], check=True, capture_output=True)
        with open(os.path.join(folder, "tokens.csv"), "w") as f:
            f.write(f"{ADMIN},admin,admin,system:masters\n")
        here = f"http://127.0.0.1:{self.etcd_port}"
        there = f"http://127.0.0.1:{peer}"
        self.etcd = self.start("etcd", "--data-dir", os.path.join(folder, "etcd"), "--listen-client-urls", here, "--advertise-client-urls", here,
                               "--listen-peer-urls", there, "--initial-advertise-peer-urls", there, "--initial-cluster", f"default={there}",
                               "--unsafe-no-fsync", "--log-level", "warn")
        self.api = None

    def start(self, *args: str) -> subprocess.Popen:
        log = open(os.path.join(self.folder, args[0] + ".log"), "a")
        return subprocess.Popen([self.servers, *args], stdout=log, stderr=log)

    def start_api(self) -> None:
        """Starts kube-apiserver, and waits until it is ready. It compacts etcd every 4 s, so that old versions expire soon."""
        self.api = self.start("kube-apiserver", "--etcd-servers", f"http://127.0.0.1:{self.etcd_port}", "--bind-address", "127.0.0.1",
                              "--secure-port", str(self.port), "--cert-dir", os.path.join(self.folder, "certs"), "--service-cluster-ip-range", "10.96.0.0/16",
                              "--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", self.key,
                              "--service-account-signing-key-file", self.key, "--token-auth-file", os.path.join(self.folder, "tokens.csv"),
                              "--authorization-mode", "RBAC", "--endpoint-reconciler-type", "none", "--etcd-compaction-interval", "4s", *self.flags)
        end = time.time() + 300
        while time.time() < end:
            if self.api.poll() is not None:
                sys.exit("kube-apiserver has ended; see " + self.folder)
            try:
                if self.request("GET", "/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.3)
        sys.exit("kube-apiserver is not ready after 5 minutes; see " + self.folder)

    def stop(self) -> None:
        for process in (self.api, self.etcd):
            if process:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def restart_api(self) -> None:
        """A server that starts again knows no history."""
        self.api.kill()
        self.api.wait()
        self.start_api()

    def connection(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=120)

    def request(self, method: str, path: str, body: object = None, token: str = ADMIN, kind: str = "application/json") -> tuple[int, str, str]:
        c = self.connection()
        headers = {"Authorization": "Bearer " + token, "Accept": "application/json", "Content-Type": kind}
        c.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = c.getresponse()
        text = answer.read().decode()
        c.close()
        return answer.status, answer.getheader("Content-Type"), text

    def change(self, method: str, path: str, body: object, kind: str = "application/json") -> dict:
        status, _, text = self.request(method, path, body, kind=kind)
        if status >= 300:
            sys.exit(f"{method} {path}: {status} {text}")
        return json.loads(text)


def shorter(body: str) -> str:
    """The lines of a body without metadata.managedFields."""
    def strip(value: object) -> object:
        if isinstance(value, dict):
            value.pop("managedFields", None)
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            strip(part)
        return value

    lines = body.strip().splitlines()
    return "\n".join(json.dumps(strip(json.loads(line)), separators=(",", ":")) if line.startswith("{") else line for line in lines)


class Recording:
    """The exchanges of a client with one token."""

    def __init__(self, cluster: Cluster, token: str):
        self.cluster, self.token, self.text = cluster, token, []

    def get(self, path: str, token: str = "", **query: object) -> tuple[int, str]:
        """Sends a request, and records it with its answer."""
        url = path + "?" + urllib.parse.urlencode(sorted(query.items()))
        status, kind, body = self.cluster.request("GET", url, token=token or self.token)
        self.text.append(f"GET {url}\n{status} {kind}\n{shorter(body)}\n")
        return status, body

    def want(self, status: int, path: str, token: str = "", **query: object) -> dict:
        got, body = self.get(path, token, **query)
        if got != status:
            sys.exit(f"{path} {query}: status {got}, want {status}: {body}")
        return json.loads(body) if body.startswith("{") and "watch" not in query else {"body": body}

    def watch(self, path: str, version: str, changes, seconds: int = 6, **query: object) -> tuple[str, list[dict]]:
        """Watches while changes are made. It returns the last version, and the events."""
        got = []
        thread = threading.Thread(target=lambda: got.append(self.want(200, path, watch=1, allowWatchBookmarks="true", resourceVersion=version,
                                                                      timeoutSeconds=seconds, **query)))
        thread.start()
        time.sleep(1)
        changes()
        thread.join()
        events = [json.loads(line) for line in got[0]["body"].splitlines()]
        print(f"{path}: {[e['type'] for e in events]}", file=sys.stderr)
        return events[-1]["object"]["metadata"].get("resourceVersion", ""), events


def expired(token: str, key: str) -> str:
    """The token as it was two hours ago, when it had a minute to live."""
    def encode(b: bytes) -> str:
        return base64.urlsafe_b64encode(b).rstrip(b"=").decode()

    head, claims, _ = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(claims + "=="))
    then = int(time.time()) - 7200
    claims.update(iat=then, nbf=then, exp=then + 60)
    signed = head + "." + encode(json.dumps(claims).encode())
    signature = subprocess.run(["openssl", "dgst", "-sha256", "-sign", key], input=signed.encode(), check=True, capture_output=True).stdout
    return signed + "." + encode(signature)


def pod(name: str) -> dict:
    return {"metadata": {"name": name, "labels": {"app": "llm", "llm-d.ai/role": "decode"}}, "spec": {
        "automountServiceAccountToken": False, "containers": [{"name": "vllm", "image": "vllm", "ports": [{"containerPort": 8000}]}]}}


def label(c: Cluster, name: str, key: str, value: str) -> None:
    c.change("PATCH", f"{PODS}/{name}", {"metadata": {"labels": {key: value}}}, kind="application/merge-patch+json")


def make_pod(c: Cluster, name: str, ip: str) -> None:
    c.change("POST", PODS, pod(name))
    c.change("POST", f"{PODS}/{name}/binding", {"metadata": {"name": name}, "target": {"kind": "Node", "name": "node"}})
    set_status(c, name, ip, "True")


def set_status(c: Cluster, name: str, ip: str, ready: str) -> None:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    if ready != "True":
        condition.update(reason="ContainersNotReady", message="containers with unready status: [vllm]")
    c.change("PATCH", f"{PODS}/{name}/status", {"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [condition]}},
             kind="application/merge-patch+json")


def make_objects(c: Cluster) -> str:
    """Makes the objects at the beginning, and returns a token of kvroute's service account."""
    c.change("POST", "/api/v1/namespaces", {"metadata": {"name": "models"}})
    for name in "default", "kvroute":
        c.change("POST", "/api/v1/namespaces/models/serviceaccounts", {"metadata": {"name": name}})
    c.change("POST", ROLES, {"metadata": {"name": "kvroute"}, "rules": RULES})
    c.change("POST", ROLES.replace("roles", "rolebindings"), {
        "metadata": {"name": "kvroute"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "kvroute"},
        "subjects": [{"kind": "ServiceAccount", "name": "kvroute", "namespace": "models"}]})
    make_pod(c, "a", "10.0.0.1")
    make_pod(c, "b", "10.0.0.2")
    token = c.change("POST", "/api/v1/namespaces/models/serviceaccounts/kvroute/token", {"spec": {"expirationSeconds": 3600}})
    return token["status"]["token"]


def record_pods(c: Cluster, r: Recording) -> None:
    """A list in pages, a watch, a restart of the server, pages that expire, and requests that are refused."""
    query = {"labelSelector": "app=llm"}

    def pages() -> str:
        page = r.want(200, PODS, limit=1, **query)
        while page["metadata"].get("continue"):
            page = r.want(200, PODS, limit=1, **{"continue": page["metadata"]["continue"]}, **query)
        return page["metadata"]["resourceVersion"]

    def changes() -> None:
        set_status(c, "a", "10.0.0.1", "False")
        c.change("POST", PODS, pod("c"))
        label(c, "c", "app", "other")
        c.change("DELETE", f"{PODS}/b", {"gracePeriodSeconds": 600})

    version, events = r.watch(PODS, pages(), changes, **query)
    if events[-1]["type"] != "BOOKMARK":
        sys.exit("the watch ends without a bookmark")
    label(c, "c", "try", "0")
    c.restart_api()
    _, events = r.watch(PODS, version, lambda: None, **query)
    if events[0]["type"] != "ERROR":
        sys.exit("a version from before the restart is not too old")

    first = r.want(200, PODS, limit=1, **query)
    follow = {"limit": 1, "continue": first["metadata"]["continue"], **query}
    url = PODS + "?" + urllib.parse.urlencode(sorted(follow.items()))
    for i in range(60):  # until the server has compacted etcd
        label(c, "c", "try", str(i))
        if c.request("GET", url, token=r.token)[0] == 410:
            break
        time.sleep(1)
    r.want(410, PODS, **follow)
    version = r.want(200, PODS, **query)["metadata"]["resourceVersion"]

    watched = dict(watch=1, allowWatchBookmarks="true", resourceVersion=version, timeoutSeconds=6, **query)

    def allow(verbs: list[str]) -> None:
        c.change("PUT", f"{ROLES}/kvroute", {"metadata": {"name": "kvroute"}, "rules": [{**RULES[0], "verbs": verbs}, *RULES[1:]] if verbs else RULES[1:]})
        time.sleep(2)  # until the server's authorizer has it

    allow(["list"])
    r.want(403, PODS, **watched)
    allow([])
    r.want(403, PODS, limit=1, **query)
    allow(["list", "watch"])
    r.want(401, PODS, token=expired(r.token, c.key), limit=1, **query)
    r.watch(PODS, pages(), lambda: c.change("DELETE", f"{PODS}/b", {"gracePeriodSeconds": 0}), **query)


def record_slices(c: Cluster, r: Recording) -> None:
    """An EndpointSlice whose pod ends, and gets an address again."""
    def endpoints(ready: bool, terminating: bool) -> dict:
        return {"metadata": {"name": "vllm-1", "labels": {"kubernetes.io/service-name": "vllm"}}, "addressType": "IPv4", "ports": [{"name": "http", "port": 8000}],
                "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready, "serving": True, "terminating": terminating},
                               "targetRef": {"kind": "Pod", "namespace": "models", "name": "a", "uid": "6e0c6a0e-0000-4000-8000-000000000001"}}]}

    query = {"labelSelector": "kubernetes.io/service-name=vllm"}
    c.change("POST", SLICES, endpoints(True, False))
    version = r.want(200, SLICES, limit=1, **query)["metadata"]["resourceVersion"]
    r.watch(SLICES, version, lambda: c.change("PUT", f"{SLICES}/vllm-1", endpoints(False, True)), **query)


def record_pools(c: Cluster, r: Recording) -> None:
    """An InferencePool: without its definition, then there, then deleted. Its fields are not checked."""
    query = {"fieldSelector": "metadata.name=llm"}
    r.get(POOLS, limit=1, **query)
    c.change("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", {
        "metadata": {"name": "inferencepools.inference.networking.k8s.io", "annotations": {"api-approved.kubernetes.io": "unapproved, for a recording"}},
        "spec": {"group": "inference.networking.k8s.io", "scope": "Namespaced",
                 "names": {"plural": "inferencepools", "singular": "inferencepool", "kind": "InferencePool", "listKind": "InferencePoolList"},
                 "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}]}})
    while c.request("GET", POOLS)[0] != 200:
        time.sleep(0.3)
    c.change("POST", POOLS, {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": "llm"}, "spec": {
        "selector": {"matchLabels": {"app": "llm"}}, "targetPorts": [{"number": 8000}], "endpointPickerRef": {"name": "kvroute", "port": {"number": 9002}}}})
    version = r.want(200, POOLS, limit=1, **query)["metadata"]["resourceVersion"]
    r.watch(POOLS, version, lambda: c.change("DELETE", f"{POOLS}/llm", None), **query)


def main() -> None:
    servers, file, flags = sys.argv[1], sys.argv[2], sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        c = Cluster(servers, folder, flags)
        try:
            c.start_api()
            r = Recording(c, make_objects(c))
            version = json.loads(c.request("GET", "/version")[2])
            record_pods(c, r)
            record_slices(c, r)
            record_pools(c, r)
            r.get(PODS, watch=1, sendInitialEvents="true", resourceVersionMatch="NotOlderThan", allowWatchBookmarks="true", timeoutSeconds=6, labelSelector="none=none")
        finally:
            c.stop()
    said = f"# kube-apiserver {version['gitVersion']}" + (f", which emulates {version['emulationMajor']}.{version['emulationMinor']}" if flags else "")
    with open(file, "w") as f:
        f.write(said + ", by tools/kubernetes-answers.py\n\n" + "\n".join(r.text))


if __name__ == "__main__":
    main()
