"""Pipeline schedules as tables: phases x actions per rank."""
