-- For wrk: posts the lines of a file in turn, each thread and connection from its own place on.
local bodies, at = {}, 0

function init(arguments)
  for line in io.lines(arguments[1]) do bodies[#bodies + 1] = line end
end

function request()
  at = at % #bodies + 1
  return wrk.format("POST", nil, { ["Content-Type"] = "application/json" }, bodies[at])
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format("RESULT %d %d %d %.3f %.3f %d\n", summary.requests, summary.duration,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000, summary.bytes))
end
