// SPDX-License-Identifier: Apache-2.0

// Command otelcol is an OpenTelemetry collector for tests: it receives OTLP and sends it on as OTLP
// over gRPC. Its argument is --config with a URI, as of OpenTelemetry's own collector.
package main

import (
	"log"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/yamlprovider"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/exporter/otlpexporter"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

func main() {
	cmd := otelcol.NewCommand(otelcol.CollectorSettings{
		BuildInfo: component.NewDefaultBuildInfo(),
		Factories: func() (f otelcol.Factories, err error) {
			if f.Receivers, err = otelcol.MakeFactoryMap[receiver.Factory](otlpreceiver.NewFactory()); err != nil {
				return f, err
			}
			f.Telemetry = otelconftelemetry.NewFactory()
			f.Exporters, err = otelcol.MakeFactoryMap[exporter.Factory](otlpexporter.NewFactory())
			return f, err
		},
		ConfigProviderSettings: otelcol.ConfigProviderSettings{ResolverSettings: confmap.ResolverSettings{
			ProviderFactories: []confmap.ProviderFactory{yamlprovider.NewFactory()}, DefaultScheme: "yaml",
		}},
	})
	if err := cmd.Execute(); err != nil {
		log.Fatal(err)
	}
}
