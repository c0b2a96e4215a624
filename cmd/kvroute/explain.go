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
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
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
		api.Decision
		Decisions []api.Decision `json:"decisions"`
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

func printDecision(out io.Writer, d *api.Decision) error {
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
	line("mode", "%s", d.ModeText)
	if t := d.Thresholds; t != nil && *t != (router.Thresholds{}) {
		text, err := json.Marshal(t)
		if err != nil {
			return err
		}
		line("thresholds", "%s", text)
	}
	printChoice(line, d)
	switch {
	case d.NoLeg != "" && d.Prefill == nil:
		line("prefill leg", "none: %s", d.NoLeg)
	case d.NoLeg != "":
		line("prefill leg", "%s: the worker computes the prompt", d.NoLeg)
	}
	if d.Served.IsValid() {
		line("served by", "%s, because the chosen worker did not take the request", d.Served)
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
		line("first token", "after %v, %s", d.FirstToken.Sub(d.Time), d.FirstTokenText)
	case d.FirstTokenText != "":
		line("first token", "%s", d.FirstTokenText)
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
		printChoice(line, d.Prefill)
		if err := w.Flush(); err != nil {
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
func printChoice(line func(name, format string, args ...any), d *api.Decision) {
	line("worker", "%s at %s", d.Worker.Label(d.WorkerName), d.Address)
	line("reason", "%s: %s", d.Reason, d.ReasonText)
	if d.SettingsText != "" {
		line("settings", "%s", d.SettingsText)
	}
	if d.Policy != "" {
		line("output", "%s tokens expected", exactly(d.ExpectedOutput))
	}
	if d.ActivePrefix > 0 {
		line("in use", "the first %d tokens, by requests on the worker that has most of the prompt; it has %d", d.ActivePrefix, d.Sharers)
	}
	line("expected", "%d of its blocks are cached, %d tokens to compute, first token in %.0f ms (%.0f ms by rule of thumb)", d.OverlapBlocks, d.PrefillTokens, d.EstimatedTTFT, d.CoarseTTFT)
}

// exactly prints a number without rounding: the costs can be computed again from it.
func exactly(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

// printCandidates prints the inputs of each worker as a row.
func printCandidates(out io.Writer, d *api.Decision) error {
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
	drawn := drawn(d)
	head := "worker\tcached\tcoming\thost\tdisk\tpending\twaiting\trequests\tdecoding\tto decode\tactive\tadds\tkv use\tplaces\tspeed\ttaints\tdelay\tcost\t"
	if drawn {
		head += "chance\t"
	}
	fmt.Fprintln(t, head)
	for _, c := range d.Candidates {
		cost := "-"
		if d.Policy != "" && c.Excluded == "" {
			cost = exactly(c.Cost)
		}
		blocks := fmt.Sprintf("%d\t%d\t%d\t%d", c.OverlapBlocks, c.PendingBlocks, c.HostBlocks, c.DiskBlocks)
		load := fmt.Sprintf("%d\t%d\t%d\t%d\t%d\t%d\t%d", c.PendTokens, c.WaitingRequests, c.ActiveRequests,
			c.DecodeTokens, c.WaitingTokens, c.ActiveBlocks, c.AdditionalBlocks)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%.0f\t%s\t", c.Worker.Label(c.WorkerName), blocks, load,
			exactly(c.KVUse), c.MaxRequests, exactly(cmp.Or(c.Speed, 1)), exactly(c.TaintWeight), c.DecodeDelay, cost)
		if drawn {
			fmt.Fprintf(t, "%s\t", exactly(c.Probability))
		}
		if c.VerdictText != "" {
			fmt.Fprint(t, "  ", c.VerdictText) // no column: it is not aligned
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if d.Omitted > 0 {
		fmt.Fprintf(out, "Not stored: %d more workers of the pool. Those above have the lowest costs.\n", d.Omitted)
	}
	return nil
}

// drawn reports whether the worker was drawn at random by a temperature.
func drawn(d *api.Decision) bool {
	return d.Policy != "" && d.Settings != nil && d.Settings.Temperature > 0
}
