// SPDX-License-Identifier: Apache-2.0

package api

import "time"

// Hurried returns a configuration whose /v1/live has these ticks in place of a clock's, and a limit
// of the time of a write.
func Hurried(c Config, ticks <-chan time.Time, stall time.Duration) Config {
	c.ticks, c.stall = ticks, stall
	return c
}

// Bodies are values of this package's own types of bodies, by the names of their schemas in docs/openapi.yaml.
var Bodies = map[string]any{
	"RoutingRequest": question{}, "BestWorker": answer{}, "PrefillLeg": leg{}, "Booking": booking{},
	"ThresholdsOfModel": modelThresholds{}, "ThresholdsChange": modelThresholds{},
	"WorkerID": registered{}, "WorkerRecord": registration{}, "Heartbeat": beat{},
	"History": history{}, "DumpHeader": dumpHeader{}, "DumpPool": dumpPool{}, "DumpEnd": dumpEnd{}, "DumpCounts": dumpEnd{}.End,
}
