// SPDX-License-Identifier: Apache-2.0

package attention

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/router"
)

// docs are the sections of the documentation, by what.
//
//nolint:gochecknoglobals // a table
var docs = map[string]string{
	"":               "workers.md#faults-of-workers", // every fault of a worker that is not listed
	"answers_errors": "workers.md#workers-that-answer-errors",
	"avoided":        "troubleshooting.md#workerfailing",
	"bus":            "troubleshooting.md#nats-and-replicas",
	"departs":        "troubleshooting.md#indexdeparts",
	"envoy":          "envoy.md#is-kvroute-used",
	"events":         "protocol.md#states-of-a-rank",
	"health":         "workers.md#health",
	"kubernetes":     "troubleshooting.md#workers-in-kubernetes",
	"left":           "workers.md#workers-that-died-or-left",
	"models":         "requests.md#models",
	"no_response":    "troubleshooting.md#workerfailing",
	"probes":         "workers.md#health",
	"ready":          "operations.md#degraded-states",
	"settings":       "troubleshooting.md#settings-and-access",
	"silent":         "troubleshooting.md#workerunhealthy",
	"tokens":         "troubleshooting.md#tokenizerdrift",
	"unresolved":     "workers.md#workers-that-died-or-left",
	"workers":        "troubleshooting.md#workers",
}

// DocsOf returns the address of the documentation of a version of kvroute: of the tag of a release, else of the main
// branch.
func DocsOf(version string) string {
	ref := "main"
	if digits, found := strings.CutPrefix(version, "v"); found && strings.Trim(digits, "0123456789.") == "" {
		ref = version
	}
	return "https://github.com/kvroute/kvroute/blob/" + ref + "/docs/"
}

// SectionOf returns the section of the documentation about an item's what, below the address of [DocsOf].
func SectionOf(what string) string {
	section, known := docs[what]
	if !known {
		section = docs[""]
	}
	return section
}

// Silence begins the text of the fault silent, before its cause.
const Silence = "it gets requests only if no worker is better: "

const (
	mendWorker = "look at the process and the log of the worker; start it again, or remove it"
	checkNATS  = "start NATS, or correct nats-url"
	mendSource = "grant the rule in the text, create the missing object, or let kvroute's pods reach the API server"
	mendPod    = "correct the labels and annotations of the pod, or the source in kubernetes.sources"
)

// advices say what to do, by what, where the text of the item does not say it.
//
//nolint:gochecknoglobals // a table
var advices = map[string]string{
	"departs":              "if it lasts, look for lost events, and for a cache of the engine that publishes no events",
	"envoy":                "compare --envoy-admin of kvroute serve with --admin of kvroute config envoy",
	"event_socket_refused": "start the engine, or correct the worker's events",
	"events":               "give the engine a replay socket, or run kvroute publish beside it: then lost events come again",
	"tokens":               "compare tokenizer and chat template with the engine's; kvroute tokenize shows the ids",
}

// imperative finds the end of a text that says what to do.
var imperative = regexp.MustCompile(`[;:] ((?:check|compare|correct|give|let|look|put|remove|set|start) .*)$`)

// cutAdvice returns a text without its end that says what to do, and that end. Without one, and for a worker that gives
// no response, the advice is that of what the item is about.
func cutAdvice(what, text string) (rest, advice string) {
	rest, advice = text, advices[what]
	if at := imperative.FindStringSubmatchIndex(text); at != nil {
		rest, advice = text[:at[0]], text[at[2]:]
	}
	if advice == "" || what == "no_response" {
		advice = mendWorker
	}
	return rest, advice
}

// adviceOfHealth says what to do about a worker that is neither healthy nor dead.
func adviceOfHealth(health string) string {
	switch health {
	case router.Starting.String():
		return "wait until the engine has loaded the model; if that takes long, look at the log of the engine"
	case router.NotReady.String():
		return "look at the pod and its events with kubectl describe pod"
	}
	return "look at the engine and the network; over NATS, check that kvroute publish runs"
}

// adviceOfCheck says what to do if a check of /readyz fails.
func adviceOfCheck(check string) string {
	switch check {
	case "workers":
		return "start a worker, or add one to the configuration"
	case "healthy_workers":
		return mendWorker
	case "nats", "registry":
		return checkNATS
	case "events", "event_store":
		return "look at the log of kvroute for what it cannot read from JetStream"
	}
	return "look at the log of kvroute"
}

// HowToProbe tells an operator what to do if an engine that serves answers the probes of its health with an error, or
// too late. It is empty for other causes.
func HowToProbe(cause string) string {
	if strings.Contains(cause, "with status") || strings.HasPrefix(cause, "timeout") {
		return "; if its health has another path, or takes longer, set health: {path: …, timeout: …}, or health: none"
	}
	return ""
}

// HowToPublish tells an operator what to do when no event of a worker was ever heard. It names the sockets
// that the worker's record has.
func HowToPublish(w *router.WorkerState) string {
	e := engine.Of(w.Engine)
	if e.HowToPublish == "" {
		e = engine.Of(engine.VLLM)
	}
	text := e.HowToPublish
	if w.Endpoint != "" {
		text = withSocket(text, `"endpoint":"`, w.Endpoint)
		text = withSocket(text, `,"replay_endpoint":"`, w.Replay)
	}
	if w.NeverHeard {
		transport := "zmq"
		if e.Polled {
			transport = "http_poll"
		}
		text += " and set events: {transport: " + transport +
			"} for the worker, or events: {transport: none} if it publishes none"
	} else if w.Endpoint != "" {
		text = fmt.Sprintf("kvroute reads %s; %s, or set events.endpoint of the worker to the engine's socket",
			w.Endpoint, text)
	}
	return text
}

// withSocket replaces the engine's address behind a key: it binds the port of the address that kvroute connects
// to. Without an address it removes the key.
func withSocket(text, key, address string) string {
	before, rest, has := strings.Cut(text, key)
	_, after, ends := strings.Cut(rest, `"`)
	switch {
	case !has || !ends:
		return text
	case address == "":
		return before + after
	}
	if port := strings.LastIndexByte(address, ':'); strings.HasPrefix(address, "tcp://") && port > len("tcp:") {
		address = "tcp://*" + address[port:]
	}
	return before + key + address + `"` + after
}
