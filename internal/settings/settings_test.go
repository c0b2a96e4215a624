// SPDX-License-Identifier: Apache-2.0

package settings_test

import (
	"flag"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/settings"
)

type some struct {
	Mode  string        `yaml:"mode" default:"fast" want:"fast, slow or nothing" help:"fast or slow"`
	Count int           `yaml:"count" default:"1" want:"1, 3 or 5" help:"<number> of things"`
	Wait  time.Duration `yaml:"wait" default:"2s" want:"50ms to 1m" help:"<time> of a wait"`
	Share *float64      `yaml:"share" want:"0 or more" help:"<share> of all"`
	Inner `yaml:",inline"`
	List  []string `yaml:"list,omitempty"` // in the file only
}

type Inner struct {
	Limit float64 `yaml:"limit" default:"3" want:"more than 0, at most 1e9" help:"<number> at most"`
}

// Help is the method of a struct without help tags. outer has it, too, since inner is embedded.
func (*inner) Help(setting string) string {
	return map[string]string{"limit": "<number> at most", "count": "not of outer"}[setting]
}

type inner struct {
	Limit float64 `yaml:"limit"`
	Other int     `yaml:"other"`
}

type outer struct {
	inner `yaml:",inline"`
	Count int `yaml:"count" help:"<number> of things"`
}

func TestHelpOfEmbeddedStructs(t *testing.T) {
	want := map[string]string{"limit": "<number> at most", "other": "", "count": "<number> of things"}
	for name, s := range settings.All(new(outer)) {
		if s.Help != want[name] {
			t.Errorf("the help text of %s is %q, want %q", name, s.Help, want[name])
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("settings without a row: %v", want)
	}
}

func TestSettings(t *testing.T) {
	for args, want := range map[string]string{
		"":                                   "",
		"--mode= --count 5 --wait 1m":        "",
		"--share 0.5 --limit 1e9":            "",
		"--mode medium":                      `mode is "medium", want fast, slow or nothing`,
		"--count 2":                          `count is "2", want 1, 3 or 5`,
		"--wait 61s":                         `wait is "1m1s", want 50ms to 1m`,
		"--wait 49ms":                        `wait is "49ms", want 50ms to 1m`,
		"--share -1":                         `share is "-1", want 0 or more`,
		"--limit 0":                          `limit is "0", want more than 0, at most 1e9`,
		"--limit 1.1e9":                      `limit is "1.1e+09", want more than 0, at most 1e9`,
		"--limit NaN":                        `limit is "NaN", want more than 0, at most 1e9`,
		"--limit 0 --mode medium --count -3": "mode is \"medium\", want fast, slow or nothing\ncount is \"-3\", want 1, 3 or 5\nlimit is \"0\", want more than 0, at most 1e9",
	} {
		var s some
		settings.SetDefaults(&s)
		fs := flag.NewFlagSet("test", flag.ContinueOnError)
		fs.SetOutput(io.Discard)
		settings.AddFlags(fs, &s)
		if err := fs.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		got := ""
		if err := settings.Check(&s); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %s\nwant %s", args, got, want)
		}
	}
	var a, b some
	settings.SetDefaults(&a)
	settings.SetDefaults(&b)
	b.Limit, b.Mode = 4, "slow"
	if got := settings.Changed(&a, &b); !slices.Equal(got, []string{"limit", "mode"}) {
		t.Errorf("changed: %v", got)
	}
	if a.Mode != "fast" || a.Wait != 2*time.Second || a.Share != nil || a.Limit != 3 {
		t.Errorf("defaults: %+v", a)
	}
}
