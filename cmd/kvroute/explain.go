// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/doctor"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// explain prints a recent decision of a running kvroute: what the router knew of each
// worker, why it chose one, and how long each step took.
func explain(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("explain")
	var from apiClient
	from.flags(fs)
	raw := fs.Bool("json", false, "print the decision as JSON")
	rest, err := parseArgs(fs, args)
	if err := errors.Join(err, from.readToken()); err != nil {
		return err
	}
	if len(rest) != 1 {
		return usageError("want the id of a request, as in x-dynamo-request-id, or \"last\"")
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	id := rest[0]
	query := "id=" + url.QueryEscape(id)
	if id == "last" {
		query = "limit=1"
	}
	var answer struct {
		router.Decision
		Decisions []router.Decision `json:"decisions"`
	}
	if err := from.read(ctx, "/v1/decisions?"+query, &answer); err != nil {
		return err
	}
	d := &answer.Decision
	if id == "last" {
		if len(answer.Decisions) == 0 {
			return errors.New("nothing was decided yet")
		}
		d = &answer.Decisions[0]
	}
	if *raw {
		return writeJSON(std.out, d)
	}
	return printDecision(std.out, d)
}

func printDecision(out io.Writer, d *router.Decision) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, name+"\t"+format+"\n", args...)
	}
	line("request", "%s, %s", d.ID, d.Time.Format(time.RFC3339Nano))
	mode := string(d.TokenMode)
	if d.TokenReason != "" {
		mode += ": " + d.TokenReason
	}
	line("model", "%s", d.Model)
	line("prompt", "%d tokens (%s), %d full blocks of %d", d.PromptTokens, mode, d.PromptBlocks, d.BlockSize)
	line("mode", "%s", modeOf(d))
	if t := d.Thresholds; t != nil && *t != (router.Thresholds{}) {
		text, err := json.Marshal(t)
		if err != nil {
			return err
		}
		line("thresholds", "%s", text)
	}
	if err := printChoice(line, d); err != nil {
		return err
	}
	switch {
	case d.NoLeg != "" && d.Prefill == nil:
		line("prefill leg", "none: %s", d.NoLeg)
	case d.NoLeg != "":
		line("prefill leg", "%s: the worker computes the prompt", d.NoLeg)
	}
	steps := fmt.Sprintf("tokens %v, hashes %v, match %v, choice and booking %v", d.TokenizeTime, d.HashTime, d.MatchTime, d.PickTime)
	if d.ProbeTime > 0 {
		steps = fmt.Sprintf("probe %v, ", d.ProbeTime) + steps
	}
	if d.QueueTime > 0 {
		steps = fmt.Sprintf("waited %v; ", d.QueueTime) + steps
	}
	line("time", "%s", steps)
	switch {
	case !d.FirstToken.IsZero():
		line("first token", "after %v, %s", d.FirstToken.Sub(d.Time), noticed(d.FirstTokenBy))
	case d.FirstTokenBy == router.SignEnd:
		line("first token", "not seen before the end of the response")
	}
	if !d.Freed.IsZero() {
		line("end", "after %v", d.Freed.Sub(d.Time))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if err := printCandidates(out, d); err != nil {
		return err
	}
	if d.Prefill != nil {
		fmt.Fprintln(out, "\nprefill leg:")
		if err := errors.Join(printChoice(line, d.Prefill), w.Flush()); err != nil {
			return err
		}
		fmt.Fprintln(out)
		if err := printCandidates(out, d.Prefill); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintln(out, "cached, host, disk: blocks of the prompt; coming: cached blocks that another request still computes; active, adds: blocks of requests;\n"+
		"pending: prefill tokens; decoding, to decode: tokens that requests hold, after and before their first token; waiting: requests before it;\n"+
		"places: requests that the engine computes at a time, 0 if unknown; speed: compared with the pool; delay: part of the cost for requests that decode there, in tokens. docs/routing.md has the formulas.")
	return err
}

// printChoice prints the worker of a decision or a prefill leg, and why it was chosen.
func printChoice(line func(name, format string, args ...any), d *router.Decision) error {
	if d.Policy != "" && d.Settings != nil {
		text, err := settingsOf(d.Settings)
		if err != nil {
			return err
		}
		line("settings", "%s", text)
	}
	if d.Policy != "" {
		line("output", "%s tokens expected", exactly(d.ExpectedOutput))
	}
	if d.ActivePrefix > 0 {
		line("in use", "the first %d tokens, by requests on the worker that has most of the prompt; it has %d", d.ActivePrefix, d.Sharers)
	}
	line("worker", "%s at %s", doctor.WorkerName(d.Worker, d.WorkerName), d.Address)
	if d.Member != nil {
		line("member", "%s, named by the group", doctor.WorkerName(*d.Member, ""))
	}
	line("reason", "%s", because(d))
	line("expected", "%d of its blocks are cached, %d tokens to compute, first token in %.0f ms (%.0f ms by rule of thumb)", d.OverlapBlocks, d.PrefillTokens, d.EstimatedTTFT, d.CoarseTTFT)
	return nil
}

// noticed says how kvroute learnt of the first token.
func noticed(by router.Sign) string {
	switch by {
	case router.SignOrder:
		return "inferred: a later request had its first token"
	case router.SignRate:
		return "inferred from the worker's rate"
	case router.SignEnd:
		return "at the latest: the response was not streamed"
	default:
		return "reported by " + string(by)
	}
}

// exactly prints a number without rounding: the costs can be computed again from it.
func exactly(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

// printCandidates prints the inputs of each worker as a row.
func printCandidates(out io.Writer, d *router.Decision) error {
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
	drawn, groups := drawn(d), false
	head := "worker\tcached\tcoming\thost\tdisk\tpending\twaiting\trequests\tdecoding\tto decode\tactive\tadds\tkv use\tplaces\tspeed\ttaints\tdelay\tcost\t"
	if drawn {
		head += "chance\t"
	}
	fmt.Fprint(t, head+"\t\n")
	for _, c := range d.Candidates {
		mark := ""
		switch {
		case c.Worker == d.Worker:
			mark = "<- chosen"
		case c.Excluded != "":
			mark = "not: " + string(c.Excluded)
		}
		if c.Group != "" {
			mark += groupMark(&c)
			groups = true
		}
		cost := "-"
		if d.Policy != "" && c.Excluded == "" {
			cost = exactly(c.Cost)
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%d\t%s\t%s\t%.0f\t%s\t", doctor.WorkerName(c.Worker, c.WorkerName),
			c.OverlapBlocks, c.PendingBlocks, c.HostBlocks, c.DiskBlocks, c.PendTokens, c.WaitingRequests, c.ActiveRequests, c.DecodeTokens, c.WaitingTokens,
			c.ActiveBlocks, c.AdditionalBlocks, exactly(c.KVUse), c.MaxRequests, exactly(cmp.Or(c.Speed, 1)), exactly(c.TaintWeight), c.DecodeDelay, cost)
		if drawn {
			fmt.Fprintf(t, "%s\t", exactly(c.Probability))
		}
		fmt.Fprintf(t, "%s\t\n", mark)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if d.Omitted > 0 {
		fmt.Fprintf(out, "Not stored: %d more workers of the pool. Those above have the lowest costs.\n", d.Omitted)
	}
	for _, c := range d.Candidates {
		if f := c.Foreign; f != (router.Foreign{}) {
			fmt.Fprintf(out, "Foreign load on %s, included above (reported by the engine, not sent by kvroute): %d requests, %d of them waiting with about %d tokens, %d blocks.\n",
				doctor.WorkerName(c.Worker, c.WorkerName), f.Requests, f.Waiting, f.Tokens, f.Blocks)
		}
	}
	if !groups {
		return nil
	}
	_, err := fmt.Fprintln(out, "Router groups: the load is the sum over the members and what was sent since the summary; costs have the mean.\n"+
		"Asked: load and overlap are those of the worker that the group would choose.")
	return err
}

// groupMark says where the data of a router group come from.
func groupMark(c *router.Candidate) string {
	switch {
	case c.Probed:
		return " (group: asked)"
	case c.SummaryAge < 0:
		return fmt.Sprintf(" (group: no summary, members %d)", c.Members)
	}
	return fmt.Sprintf(" (group: members %d, summary %v ago)", c.Members, c.SummaryAge.Round(time.Millisecond))
}

// drawn reports whether the worker was drawn at random by a temperature.
func drawn(d *router.Decision) bool {
	return d.Policy != "" && d.Settings != nil && d.Settings.Temperature > 0
}

// modeOf is the mode with its inputs.
func modeOf(d *router.Decision) string {
	switch d.Mode {
	case router.RoundRobin:
		return fmt.Sprintf("%s, turn %d", d.Mode, d.Turn)
	case router.DeviceAware:
		return fmt.Sprintf("%s, ratio %s, random number %s", d.Mode, exactly(d.DeviceRatio), exactly(d.Draw))
	case router.Direct, router.LeastLoaded, router.KV, router.Random, router.PowerOfTwo:
	}
	return fmt.Sprintf("%s, random number %s", d.Mode, exactly(d.Draw))
}

// policySettings are the settings that each policy uses, by their names in JSON.
//
//nolint:gochecknoglobals // a table
var policySettings = map[scorer.Policy]string{
	scorer.Tokens:        "alpha attention decode_weight kv_read host_cache_weight disk_cache_weight",
	scorer.Dynamo:        "overlap_score_weight",
	scorer.DynamoNewer:   "overlap_score_credit overlap_score_credit_decay prefill_load_scale active_request_weight host_cache_weight disk_cache_weight",
	scorer.PredictedTTFT: "alpha decode_weight kv_read host_cache_weight disk_cache_weight",
	scorer.Weighted:      "max_batch weighted_overlap weighted_requests weighted_kv_use decode_weight kv_read",
}

// settingsOf lists the settings that the policy uses.
func settingsOf(s *scorer.Settings) (string, error) {
	var all map[string]any
	data, err := json.Marshal(s)
	if err == nil {
		err = json.Unmarshal(data, &all)
	}
	if err != nil {
		return "", err
	}
	var text strings.Builder
	text.WriteString("cost " + string(s.Policy))
	for name := range strings.FieldsSeq(policySettings[s.Policy] + " router_temperature") {
		value, _ := all[name].(float64)
		fmt.Fprintf(&text, ", %s %s", name, exactly(value))
	}
	switch e := &s.Engine; s.Policy {
	case scorer.Tokens:
		fmt.Fprintf(&text, ", engine floor %s, token %s", exactly(e.Floor), exactly(e.Token))
	case scorer.PredictedTTFT:
		fmt.Fprintf(&text, ", engine floor %s, step %s, token %s, attention %s, kv_token %s, chunk %s",
			exactly(e.Floor), exactly(e.Step), exactly(e.Token), exactly(e.Attention), exactly(e.KVToken), exactly(e.Chunk))
	case scorer.Dynamo, scorer.DynamoNewer, scorer.Weighted:
	}
	if !s.TrackPrefill {
		text.WriteString(", prefill is not tracked")
	}
	if !s.AssumeKVReuse {
		text.WriteString(", no reuse is assumed")
	}
	return text.String(), nil
}

// because says why the worker was chosen.
func because(d *router.Decision) string {
	switch d.Reason {
	case router.ReasonPinned:
		return "pinned: the request names it"
	case router.ReasonPreferred:
		return "preferred: the upper router asked for it"
	case router.ReasonSession:
		return "session: its session is bound to it"
	case router.ReasonRoundRobin, router.ReasonMode:
		return fmt.Sprintf("%s: mode %s", d.Reason, d.Mode)
	case router.ReasonKV, router.ReasonLoad, router.ReasonUnread, router.ReasonTokenizer:
	}
	text := fmt.Sprintf("%s: cost %.6g by %s", d.Reason, d.Cost, d.Policy)
	if d.Policy == "" {
		text = fmt.Sprintf("%s: cost %.6g by a rule of its own", d.Reason, d.Cost)
	}
	switch {
	case drawn(d):
		text += "; drawn by temperature"
	case d.Equal > 1:
		text += fmt.Sprintf("; %d cost the same: fewer requests, then fewer blocks, then a draw", d.Equal)
	}
	return text
}
