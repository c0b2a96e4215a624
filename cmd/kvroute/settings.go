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
	fs := flag.NewFlagSet("defaults", flag.ContinueOnError)
	addFlags(fs, &c)
	for name, s := range eachSetting(&c) {
		if text, ok := s.tag.Lookup("default"); ok {
			if err := fs.Set(name, text); err != nil {
				panic(err) // a wrong tag: the first test finds it
			}
		}
	}
	return c
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

// addFlags makes every setting a flag of fs, its value the default. Numbers that may be
// absent have none.
func addFlags(fs *flag.FlagSet, to any) {
	for name, s := range eachSetting(to) {
		if s.tag.Get("help") == "" {
			continue // in the file only, or added below
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
	if c, ok := to.(*config); ok {
		c.Access.Flags(fs)
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

// check refuses values that no package would refuse in words of the user's.
func (c *config) check() error {
	var errs []error
	for name, s := range eachSetting(c) {
		if want := s.tag.Get("want"); want != "" && !accepts(want, s.value) {
			errs = append(errs, fmt.Errorf("config: %s is %q, want %s", name, fmt.Sprint(s.value.Interface()), inWords(want)))
		}
	}
	errs = append(errs, c.checkAddresses(), c.checkModels(), c.Dynamo.check())
	for _, d := range []struct {
		name         string
		value, least time.Duration
	}{
		{"degraded-after", c.DegradedAfter, fleet.MinAge},
		{"unhealthy-after", c.UnhealthyAfter, c.DegradedAfter},
		{"expired-after", c.ExpiredAfter, c.UnhealthyAfter},
	} {
		if d.value < d.least || d.value > time.Hour {
			errs = append(errs, fmt.Errorf("config: %s is %q, want %v to 1h", d.name, d.value, d.least))
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
			errs = append(errs, errors.New("config: "+wrong.text))
		}
	}
	_, level := telemetry.NewLogger(io.Discard, c.LogLevel, c.LogFormat, nil)
	_, access := c.Options()
	_, networks := reach.Parse(c.WorkerNetworks)
	var url error
	if c.NATSURL != "" && !strings.HasPrefix(c.NATSURL, "file:") {
		url = bus.CheckURL(c.NATSURL)
	}
	for name, err := range map[string]error{
		"": cmp.Or(level, access, url, replicas.CheckGroups(c.Groups)), "worker-networks: ": networks, "forward-tokens: ": extproc.CheckForwardTokens(c.ForwardTokens),
	} {
		if err != nil {
			errs = append(errs, fmt.Errorf("config: %s%w", name, err))
		}
	}
	return errors.Join(errs...)
}

// accepts says whether a value is one of a|b, or within low..high; >low excludes low, and
// either end may be missing.
func accepts(want string, value reflect.Value) bool {
	if strings.Contains(want, "|") {
		return strings.Contains("|"+want+"|", fmt.Sprintf("|%v|", value.Interface()))
	}
	number := func(text string) float64 {
		if d, err := time.ParseDuration(text); err == nil && value.Type() == reflect.TypeFor[time.Duration]() {
			return float64(d)
		}
		n, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return math.Inf(1)
		}
		return n
	}
	v := value.Convert(reflect.TypeFor[float64]()).Float()
	low, high, _ := strings.Cut(want, "..")
	if above, exclusive := strings.CutPrefix(low, ">"); exclusive {
		return v > number(above) && v <= number(high)
	}
	return v >= number(low) && v <= number(high)
}

// inWords says what a tag accepts.
func inWords(want string) string {
	if strings.Contains(want, "|") {
		at := strings.LastIndex(want, "|")
		return strings.ReplaceAll(want[:at], "|", ", ") + " or " + want[at+1:]
	}
	low, high, _ := strings.Cut(want, "..")
	above, exclusive := strings.CutPrefix(low, ">")
	switch {
	case exclusive && high == "":
		return "more than " + above
	case exclusive:
		return "more than " + above + ", at most " + high
	case high == "":
		return low + " or more"
	}
	return low + " to " + high
}

// checkAddresses refuses addresses that are none, or that strangers can reach.
func (c *config) checkAddresses() error {
	var errs []error
	for _, a := range []struct{ name, value, guard, need string }{
		{"http-address", c.HTTPAddress, c.APITokenFile, "api-token-file"},
		{"extproc-address", c.ExtprocAddress, c.ExtprocTLSClientCA, "extproc-tls-client-ca"},
		{"nats-listen", c.NATSListen, "", "nats-url of a server with TLS, since the password here is not encrypted"},
	} {
		if _, _, err := splitAddress(a.value); err != nil && (a.value != "" || a.name != "nats-listen") {
			errs = append(errs, fmt.Errorf("config: %s is %q, want ip:port", a.name, a.value))
		} else if !c.TrustedNetwork && a.guard == "" && !loopback(a.value) {
			errs = append(errs, fmt.Errorf("config: %s is %q, which other machines can reach; give %s, or trusted-network if only trusted clients reach it", a.name, a.value, a.need))
		}
	}
	return errors.Join(errs...)
}

func (c *config) checkModels() error {
	var errs []error
	seen := map[string]bool{}
	for i, m := range c.Models {
		for _, wrong := range []struct {
			is          bool
			field, want string
		}{
			{m.Name == "", "name", "a name"},
			{seen[m.Name], "name", "each name once"},
			{m.Tokenizer == "", "tokenizer", "a folder"},
			{m.BlockSize < 0, "block-size", "0 or more tokens"},
		} {
			if wrong.is {
				errs = append(errs, fmt.Errorf("config: models[%d].%s: want %s", i, wrong.field, wrong.want))
			}
		}
		seen[m.Name] = true
	}
	return errors.Join(errs...)
}

// seconds turns a setting in seconds into a time; what is no time becomes one that
// is refused.
func seconds(s float64) time.Duration {
	if math.IsNaN(s) || s < 0 || s > 1e9 {
		return -1
	}
	return time.Duration(s * float64(time.Second))
}
