// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"

	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// ReadAround reads the instruments, and calls a function between the two steps of the reading.
func (m *Metrics) ReadAround(ctx context.Context, between func()) error {
	before := m.sums.forgetsSoFar()
	var now metricdata.ResourceMetrics
	if err := m.sums.reader.Collect(ctx, &now); err != nil {
		return err
	}
	between()
	_, err := m.sums.add(&now, before)
	return err
}
