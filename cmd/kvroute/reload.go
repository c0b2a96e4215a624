// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

func newReloads(meter metric.Meter) (metric.Int64Counter, error) {
	return meter.Int64Counter("kvroute.config.reloads", metric.WithUnit("{reload}"), metric.WithDescription("Readings of the configuration anew, by what became of them."))
}

// reload reads the configuration again on SIGHUP, and when its file or that of the API's
// tokens has changed.
func (s *server) reload(ctx context.Context) error {
	watch := newWatch(s.begun, s.file, s.conf.APITokenFile)
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.hup:
			watch.taken()
		case <-tick.C:
			if !watch.changed() {
				continue
			}
		}
		outcome := "done"
		if err := s.readAgain(ctx); err != nil {
			outcome = "refused"
			s.log.Error("the configuration is not reloaded; the old one stays", "err", err)
		}
		s.reloads.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", outcome)))
	}
}

// readAgain takes the models, workers and router groups of the configuration file, and the
// tokens of the API: all of them, or none if one has a mistake.
func (s *server) readAgain(ctx context.Context) error {
	c, _, err := s.read()
	if err != nil {
		return err
	}
	if _, err := c.checkedRouting(); err != nil {
		return err
	}
	pending := slices.DeleteFunc(c.changed(&s.given), func(name string) bool { return name == "models" || name == "workers" || name == "groups" })
	c.Attention = s.conf.Attention // which a flag may have set
	cards, err := c.loadCards(s.prompts, s.log)
	if err != nil {
		return err
	}
	takeTokens := func() {}
	if s.tokens != nil {
		if takeTokens, err = s.tokens.Read(); err != nil {
			return err
		}
	}
	undo, err := s.groups.reload(s.conf.Groups, c.Groups)
	if err != nil {
		return err
	}
	if err := s.static.set(ctx, c.Workers); err != nil {
		undo()
		return err
	}
	s.conf.Groups, s.conf.Models = c.Groups, c.Models
	s.router.SetCards(cards)
	takeTokens()
	s.warnOfWorkers()
	s.log.Info("reloaded", "models", len(c.Models), "workers", len(c.Workers))
	if len(pending) > 0 {
		s.log.Warn("these changed settings take effect only after a restart", "settings", strings.Join(pending, ", "))
	}
	return nil
}

// watchEvery is how often files are looked at. One that has changed is read when it is the
// same at two looks, so that one that is being written is not: up to twice as long.
const watchEvery = 2 * time.Second

// watch looks whether files have changed: their times, sizes, or what is behind a link. What
// is not a regular file, such as a pipe, is not watched.
type watch struct {
	files      []string
	read, seen []stamp // when they were read, and at the last look
}

// stamp is what tells a file from what it was; the zero stamp is that of no file.
type stamp struct {
	changed time.Time
	size    int64
}

// newWatch watches files that were read after a time; one that has changed since counts as
// changed. Files without a name are none.
func newWatch(after time.Time, files ...string) *watch {
	w := &watch{files: slices.DeleteFunc(files, func(f string) bool { return f == "" })}
	w.taken()
	for i := range w.read {
		if w.read[i].changed.After(after) {
			w.read[i] = stamp{size: -1} // that of no look
		}
	}
	return w
}

func (w *watch) look() []stamp {
	all := make([]stamp, len(w.files))
	for i, name := range w.files {
		if info, err := os.Stat(name); err == nil && info.Mode().IsRegular() {
			all[i] = stamp{info.ModTime(), info.Size()}
		}
	}
	return all
}

// taken says that the files are read now.
func (w *watch) taken() {
	w.read = w.look()
	w.seen = slices.Clone(w.read)
}

// changed looks at the files. If it returns true they are to be read now.
func (w *watch) changed() bool {
	now := w.look()
	settled := slices.Equal(now, w.seen)
	w.seen = now
	if !settled || slices.Equal(now, w.read) {
		return false
	}
	w.read = slices.Clone(now)
	return true
}
