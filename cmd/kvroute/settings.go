// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"iter"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/replicas"
)

// defaults returns the configuration without file and flags.
func defaults() (c config) {
	c.Version = 1
	setDefaults(&c)
	return c
}

// setDefaults sets the settings of a struct to their defaults.
func setDefaults(to any) {
	fs := flag.NewFlagSet("defaults", flag.ContinueOnError)
	addFlags(fs, to)
	for name, s := range eachSetting(to) {
		if text, ok := s.tag.Lookup("default"); ok {
			if err := fs.Set(name, text); err != nil {
				panic(err) // a wrong tag: any test fails here
			}
		}
	}
}

// setting is a field of the configuration.
type setting struct {
	tag   reflect.StructTag
	value reflect.Value
}

// eachSetting ranges over the settings of a struct with tags, and of those embedded in it.
func eachSetting(to any) iter.Seq2[string, setting] {
	return func(yield func(name string, s setting) bool) {
		v := reflect.ValueOf(to).Elem()
		for _, f := range reflect.VisibleFields(v.Type()) {
			name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
			if name == "" {
				continue // embedded
			}
			if !yield(name, setting{f.Tag, v.FieldByIndex(f.Index)}) {
				return
			}
		}
	}
}

var kindOfValue = regexp.MustCompile(`<([^>]*)>`)

// addFlags makes every setting a flag of fs, with its value as the default. Optional numbers have no
// default.
func addFlags(fs *flag.FlagSet, to any) {
	for name, s := range eachSetting(to) {
		if s.tag.Get("help") == "" {
			continue // in the file only, or one of bus.Access, which adds its own flags
		}
		help := kindOfValue.ReplaceAllString(s.tag.Get("help"), "`$1`")
		switch p := s.value.Addr().Interface().(type) {
		case *string:
			fs.StringVar(p, name, *p, help)
		case *bool:
			fs.BoolVar(p, name, *p, help)
		case *int:
			fs.IntVar(p, name, *p, help)
		case *int64:
			fs.Int64Var(p, name, *p, help)
		case *uint64:
			fs.Uint64Var(p, name, *p, help)
		case *float64:
			fs.Float64Var(p, name, *p, help)
		case *time.Duration:
			fs.DurationVar(p, name, *p, help)
		case **float64:
			fs.Func(name, help, func(text string) error {
				v, err := strconv.ParseFloat(text, 64)
				*p = &v
				return err
			})
		case **int:
			fs.Func(name, help, func(text string) error {
				v, err := strconv.Atoi(text)
				*p = &v
				return err
			})
		}
	}
	if own, ok := to.(interface{ Flags(fs *flag.FlagSet) }); ok {
		own.Flags(fs)
	}
}

// changed returns the names of the settings that have another value in other, in order.
func (c *config) changed(other *config) (names []string) {
	theirs := maps.Collect(eachSetting(other))
	for name, s := range eachSetting(c) {
		if !reflect.DeepEqual(s.value.Interface(), theirs[name].value.Interface()) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// check refuses values that no other package checks, or checks only under another name.
func (c *config) check() error {
	errs := append(wrongValues(c), c.checkAddresses(), c.checkModels(), c.Dynamo.check(), replicas.CheckGroups(c.Groups))
	for _, d := range []struct {
		name         string
		value, least time.Duration
	}{
		{"degraded-after", c.DegradedAfter, fleet.MinAge},
		{"unhealthy-after", c.UnhealthyAfter, c.DegradedAfter},
		{"expired-after", c.ExpiredAfter, c.UnhealthyAfter},
	} {
		if d.value < d.least || d.value > time.Hour {
			errs = append(errs, fmt.Errorf("%s is %q, want %v to 1h", d.name, d.value, d.least))
		}
	}
	r := c.KVEventsRetention
	for _, wrong := range []struct {
		is   bool
		text string
	}{
		{c.ForwardTokens != "" && !c.VerifyTokenizer, "forward-tokens needs verify-tokenizer: token ids go only to workers whose own ids were compared"},
		{r != 0 && (r < 30*time.Minute || r > 8760*time.Hour), fmt.Sprintf("kv-events-retention is %q, want 0, or 30m to 8760h", r)},
		{r != 0 && !c.DurableKVEvents, "kv-events-retention needs durable-kv-events: without it no stream keeps events"},
		{c.Group != "" && len(c.Groups) > 0, "group and groups are both given: the router of a group has workers, not groups"},
	} {
		if wrong.is {
			errs = append(errs, errors.New(wrong.text))
		}
	}
	_, level := telemetry.NewLogger(io.Discard, c.LogLevel, c.LogFormat, nil)
	_, access := c.Options()
	errs = append(errs, level, access)
	if _, err := reach.Parse(c.WorkerNetworks); err != nil {
		errs = append(errs, fmt.Errorf("worker-networks: %w", err))
	}
	if err := extproc.CheckForwardTokens(c.ForwardTokens); err != nil {
		errs = append(errs, fmt.Errorf("forward-tokens: %w", err))
	}
	if c.NATSURL != "" && !strings.HasPrefix(c.NATSURL, "file:") {
		errs = append(errs, bus.CheckURL(c.NATSURL))
	}
	return errors.Join(errs...)
}

// wrongValues returns an error for each setting whose value its tag does not allow.
func wrongValues(of any) (errs []error) {
	for name, s := range eachSetting(of) {
		want, value := s.tag.Get("want"), s.value
		if value.Kind() == reflect.Pointer && !value.IsNil() {
			value = value.Elem()
		}
		if text := fmt.Sprint(value.Interface()); want != "" && value.Kind() != reflect.Pointer && !accepts(want, text) {
			errs = append(errs, fmt.Errorf("%s is %q, want %s", name, text, want))
		}
	}
	return errs
}

// alternatives separates the words of a tag like "a, b or c".
var alternatives = regexp.MustCompile(`, | or `)

// accepts reports whether a tag allows a value: "a, b or nothing", "1 to 5", "0 or more", "more than
// 0", or "more than 0, at most 5".
func accepts(want, value string) bool {
	v := number(value)
	above, isAbove := strings.CutPrefix(want, "more than ")
	above, most, bounded := strings.Cut(above, ", at most ")
	low, isLow := strings.CutSuffix(want, " or more")
	from, to, isRange := strings.Cut(want, " to ")
	switch {
	case isAbove:
		return v > number(above) && (!bounded || v <= number(most))
	case isLow:
		return v >= number(low)
	case isRange:
		return v >= number(from) && v <= number(to)
	}
	return slices.Contains(alternatives.Split(want, -1), cmp.Or(value, "nothing"))
}

// number reads a number or a duration; NaN if the text is neither.
func number(text string) float64 {
	if d, err := time.ParseDuration(text); err == nil {
		return float64(d)
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return n
}

// checkAddresses refuses invalid addresses, and addresses that other machines can reach without
// permission.
func (c *config) checkAddresses() error {
	var errs []error
	for _, a := range []struct{ name, value, guard, need string }{
		{"http-address", c.HTTPAddress, c.APITokenFile, "api-token-file"},
		{"extproc-address", c.ExtprocAddress, c.ExtprocTLSClientCA, "extproc-tls-client-ca"},
		{"nats-listen", c.NATSListen, "", "nats-url of a server with TLS, since the password here is not encrypted"},
	} {
		if _, _, err := splitAddress(a.value); err != nil && (a.value != "" || a.name != "nats-listen") {
			errs = append(errs, fmt.Errorf("%s is %q, want ip:port", a.name, a.value))
		} else if !c.TrustedNetwork && a.guard == "" && !loopback(a.value) {
			errs = append(errs, fmt.Errorf("%s is %q, which other machines can reach; give %s, or trusted-network if only trusted clients reach it", a.name, a.value, a.need))
		}
	}
	return errors.Join(errs...)
}

func (c *config) checkModels() error {
	var errs []error
	seen := map[string]bool{}
	for i, m := range c.Models {
		wrong := ""
		switch {
		case m.Name == "":
			wrong = "name: want a name"
		case seen[m.Name]:
			wrong = "name: want each name once"
		case m.Tokenizer == "":
			wrong = "tokenizer: want a folder"
		case m.BlockSize < 0:
			wrong = "block-size: want 0 or more tokens"
		}
		if wrong != "" {
			errs = append(errs, fmt.Errorf("models[%d].%s", i, wrong))
		}
		seen[m.Name] = true
	}
	return errors.Join(errs...)
}
