// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed" // for the tables
	"encoding/json"
	"errors"
	"io"
	"net/url"
	"reflect"
	"strings"
	"text/tabwriter"
	"text/template"
	"time"
	"unicode"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
)

// idOfExplain says what the argument is.
const idOfExplain = "last, the x-dynamo-request-id of a response, or the client's x-request-id"

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
	if len(rest) != 1 || rest[0] == "" { // an empty one would ask for a list
		return usageError("want the id of a request: " + idOfExplain)
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
	return printExplained(std.out, d)
}

// printExplained prints a decision that came from a router.
func printExplained(out io.Writer, d *api.Decision) error {
	printable(reflect.ValueOf(d))
	return printDecision(out, d)
}

// printable replaces the control characters in all texts of a value: names come from clients and from workers' records,
// and could change the terminal.
func printable(v reflect.Value) {
	switch v.Kind() { //nolint:exhaustive // other kinds have no text
	case reflect.Pointer:
		if !v.IsNil() {
			printable(v.Elem())
		}
	case reflect.Struct:
		for _, field := range v.Fields() {
			if field.CanSet() {
				printable(field)
			}
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			printable(v.Index(i))
		}
	case reflect.String:
		v.SetString(strings.Map(func(r rune) rune {
			if !unicode.IsPrint(r) {
				return '?'
			}
			return r
		}, v.String()))
	}
}

//go:embed explain.tmpl
var explainText string

// explainTables are the tables that explain prints.
//
//nolint:gochecknoglobals // a table
var explainTables = template.Must(template.New("").Funcs(template.FuncMap{
	"json": thresholdsText, "figure": router.Figure, "rounded": router.Rounded,
}).Parse(explainText))

// thresholdsText returns thresholds as JSON, "" if there are none.
func thresholdsText(t *router.Thresholds) (string, error) {
	if t == nil || *t == (router.Thresholds{}) {
		return "", nil
	}
	text, err := json.Marshal(t)
	return string(text), err
}

func printDecision(out io.Writer, d *api.Decision) error {
	var errs []error
	table := func(name string, d *api.Decision, flags uint) {
		w := tabwriter.NewWriter(out, 0, 8, 2, ' ', flags)
		errs = append(errs, explainTables.ExecuteTemplate(w, name, d), w.Flush())
	}
	table("decision", d, 0)
	table("candidates", d, tabwriter.AlignRight)
	if d.Prefill != nil {
		table("leg", d.Prefill, 0)
		table("candidates", d.Prefill, tabwriter.AlignRight)
	}
	table("legend", d, 0)
	return errors.Join(errs...)
}
