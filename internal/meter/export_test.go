// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"log/slog"
	"time"
)

// QuietNow is Quiet with a function that advances its clock past the interval in which lines
// are omitted.
func QuietNow(log *slog.Logger) (out *slog.Logger, pass func()) {
	out = Quiet(log)
	return out, func() {
		for _, s := range out.Handler().(quiet).lines.seen {
			s.until = time.Time{}
		}
	}
}
