// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/beat"
	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/router"
)

// reload reads the configuration again on SIGHUP, and when its file or that of the API's
// tokens has changed.
func (s *server) reload(ctx context.Context) error {
	watch := newWatch(s.begun, s.file, s.conf.APITokenFile)
	tick := time.NewTimer(beat.Wait(watchEvery))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.hup:
			watch.taken()
		case <-tick.C:
			tick.Reset(beat.Wait(watchEvery))
			if !watch.changed() {
				continue
			}
		}
		outcome := "done"
		if err := s.readAgain(ctx); err != nil {
			outcome = "refused"
			s.refused.Store(err.Error())
			s.log.Error("the configuration is not reloaded; the old one stays", "err", err)
		} else if s.refused.Store(""); len(s.pending.Load().([]string)) > 0 {
			outcome = "partial"
		}
		s.metered.reloads.Count(outcome)
	}
}

// reloadable are the settings that a reload applies.
//
//nolint:gochecknoglobals // a table
var reloadable = []string{
	"active-prefill-tokens-threshold", "active-prefill-tokens-threshold-frac", "busy-threshold", "groups", "log-level",
	"models", "workers",
}

// readAgain applies the reloadable settings and the tokens of the API: all of them, or none after an
// error.
func (s *server) readAgain(ctx context.Context) error {
	c, cards, err := s.readFiles()
	if err != nil {
		return err
	}
	pending := slices.DeleteFunc(settings.Changed(&c, &s.given), func(name string) bool {
		return slices.Contains(reloadable, name) && (name != "groups" || s.groups != nil)
	})
	c.Attention = s.conf.Attention // it changes only with a restart
	takeTokens := func() {}
	if s.tokens != nil {
		if takeTokens, err = s.tokens.Read(); err != nil {
			return err
		}
	}
	undo, err := s.reloadGroups(c.Groups)
	if err != nil {
		return err
	}
	if err := s.static.set(ctx, c.Workers); err != nil {
		undo()
		return err
	}
	s.conf.Groups, s.conf.Models = c.Groups, c.Models
	s.conf.BusyThreshold = c.BusyThreshold
	s.conf.ActivePrefillTokensThreshold = c.ActivePrefillTokensThreshold
	s.conf.ActivePrefillTokensThresholdFrac = c.ActivePrefillTokensThresholdFrac
	s.shared.Store(s.conf.shared())
	s.router.SetCards(cards)
	s.renameTokens()
	routing, _ := c.routing() // read has checked it
	s.router.SetDefaultThresholds(routing.Thresholds)
	_ = s.level.UnmarshalText([]byte(c.LogLevel)) // read has checked it
	takeTokens()
	s.warnOfWorkers()
	s.log.Info("reloaded", "models", len(c.Models), "workers", len(c.Workers))
	if s.pending.Store(pending); len(pending) > 0 {
		s.log.Warn("these changed settings take effect only after a restart", "settings", strings.Join(pending, ", "))
	}
	return nil
}

// readFiles reads the configuration and the models that it names. A panic becomes an error.
func (s *server) readFiles() (c config, cards []router.Card, err error) {
	defer recovered(&err)
	if c, _, err = s.read(); err == nil {
		cards, err = c.loadCards(s.prompts, s.log)
	}
	return c, cards, err
}

// watchEvery is the time between two looks at the files. A changed file is read when two
// looks find it equal: before that it may be half written.
const watchEvery = 2 * time.Second

// watch reports when files have changed: their times or sizes, or the file behind a link.
// Files that are not regular, such as pipes, are ignored.
type watch struct {
	files      []string
	read, seen string // results of look: when the files were read, and the last one
}

// newWatch watches files that were read after a time; a file that has changed since counts
// as changed. Empty names are ignored.
func newWatch(after time.Time, files ...string) *watch {
	w := &watch{files: files}
	w.taken()
	for _, name := range files {
		if info, err := os.Stat(name); err == nil && info.Mode().IsRegular() && info.ModTime().After(after) {
			w.read = "changed"
		}
	}
	return w
}

// look returns a text that differs whenever a file has changed.
func (w *watch) look() string {
	var all strings.Builder
	for _, name := range w.files {
		if info, err := os.Stat(name); err == nil && info.Mode().IsRegular() {
			fmt.Fprint(&all, name, info.ModTime().UnixNano(), " ", info.Size(), "\n")
		}
	}
	return all.String()
}

// taken records that the files are read now.
func (w *watch) taken() {
	w.read = w.look()
	w.seen = w.read
}

// changed reports whether the files are to be read now.
func (w *watch) changed() bool {
	now := w.look()
	settled := now == w.seen
	w.seen = now
	if !settled || now == w.read {
		return false
	}
	w.read = now
	return true
}
