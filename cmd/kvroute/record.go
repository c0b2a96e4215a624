// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/kvroute/kvroute/engines"
)

// recording is where what an engine says is written down, and how much of it. The zero
// value writes nothing.
type recording struct {
	file  string
	bytes int64
	time  time.Duration
}

// start begins to write; nil if nothing is asked for. Stop is called at the end.
func (r *recording) start(log *slog.Logger) (rec *engines.Recorder, stop func(), err error) {
	if r.file == "" {
		return nil, func() {}, nil
	}
	// What prompts say can be read from their token ids.
	f, err := os.OpenFile(r.file, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("record: %w", err)
	}
	log.Info("what the engine says is recorded, token ids of prompts included", "file", r.file, "bytes", r.bytes, "time", r.time.String())
	rec = engines.NewRecorder(f, r.bytes, r.time, func(why string) {
		log.Warn("the recording ends", "file", r.file, "why", why)
	})
	return rec, func() {
		if err := f.Close(); err != nil {
			log.Warn("the recording is not whole", "file", r.file, "err", err)
		}
	}, nil
}
